"""The model ``austen-llama``: a llama of 3.7 million parameters, pretrained on five of Jane Austen's novels.

The folder also holds model card, training log and sha256 of the inputs. ``python -m sparsebp_cli.asset.pretrain`` made
it.
"""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Return the folder that ``from_pretrained`` reads: config, safetensors weights and tokenizer."""
    return Path(__file__).parent / "data" / "austen-llama"
