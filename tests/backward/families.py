"""Tiny decoders of fifteen families, with random weights: what `nodes` and the walk are held against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import FAMILIES, VOCABULARY

_COMMON: dict[str, Any] = FAMILIES["llama"]
_HEADS = _COMMON | {"head_dim": 8}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": 8},
    "qwen2": FAMILIES["qwen2"],
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma2": _HEADS,
    "gemma3_text": _HEADS,
    "phi": _COMMON,
    "phi3": _COMMON,
    "gpt_neox": FAMILIES["gpt_neox"],
    "gpt2": FAMILIES["gpt2"],
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "smollm3": _COMMON,
    "granite": _COMMON,
}


def tiny_decoder(
    family: str, *, dtype: torch.dtype = torch.float32, checkpointing: bool = False, **options: Any
) -> PreTrainedModel:
    """Return a decoder of two layers, the same for every call, in training mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(DECODERS[family] | {"vocab_size": VOCABULARY} | options))
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if checkpointing:
        checkpoint_activations(model)
    return model.train()


def every_way(family: str) -> Iterator[partial[PreTrainedModel]]:
    """Yield what makes the decoder: in each precision, by each attention, plain and with checkpointed layers."""
    attentions = ("eager",) if family == "gemma2" else ("eager", "sdpa")  # its soft caps know no sdpa
    for dtype, attention, again in itertools.product((torch.float32, torch.bfloat16), attentions, (False, True)):
        yield partial(tiny_decoder, family, dtype=dtype, attn_implementation=attention, checkpointing=again)
