"""The model ``austen-llama``: a llama of 3.7 million parameters, pretrained on five of Jane Austen's novels.

Card, training log and sha256 of the inputs lie beside the weights. Made by ``python -m sparsebp_cli.asset.pretrain``.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Return the folder that ``from_pretrained`` reads: config, safetensors weights and tokenizer."""
    return Path(__file__).parent / "data" / "austen-llama"
