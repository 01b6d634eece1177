"""Tiny models of several families, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 64
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "loss_type": "ForCausalLM",
    },
    "qwen2": _GROUPED | {"tie_word_embeddings": True},
    "qwen3": _GROUPED | {"head_dim": 8},
    "gpt_neox": _DECODER | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma2": _GROUPED | {"head_dim": 8},
}


def tiny_model(family: str, **options: Any) -> PreTrainedModel:
    """Return a model of two layers, the same for every call, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(FAMILIES[family] | options))
    model = AutoModelForCausalLM.from_config(config)
    return model.train()


def filled_cache(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the key/value cache after a forward, as an argument of the next one, by transformers' name for it."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    return {name: output[name] for name in CACHE_NAMES if name in output.keys()}  # noqa: SIM118 - old names are in it, too


def tokens(number: int, batch: int = 2, length: int = 16) -> torch.Tensor:
    """Return one batch of random tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(number))
