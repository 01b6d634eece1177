"""What the backward of a llama with adapters on queries and values has to multiply and to keep, module by module.

Written down from the mathematics, and not from a run. N = B*T rows, D hidden, H heads, G heads of keys, F inner width,
R rank, V vocabulary; 32-bit numbers. Of what several modules read, the first one counts it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from .conftest import tiny_model

B, T = 2, 16
N = B * T
RANK, BYTES = 4, 4
LAYER = "base_model.model.model.layers.{}."


def lora_llama(num_layers: int, *, convert: Any = None) -> nn.Module:
    """Return a llama whose queries and values have adapters with weights that are not zero."""
    model = tiny_model("llama", num_hidden_layers=num_layers)
    if convert is not None:
        convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.23 by an old name
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return adapted


@dataclass(frozen=True)
class Widths:
    """Of the model that ``lora_llama`` makes."""

    hidden: int = 32
    inner: int = 48
    heads: int = 4
    key_heads: int = 2
    vocabulary: int = 64

    @property
    def keys(self) -> int:
        return self.hidden // self.heads * self.key_heads


def needed_flops(num_layers: int, lowest: int) -> dict[str, int]:
    """Return the FLOPs of the backward by module, where the adapters of layers from ``lowest`` on are trained."""
    w = Widths()
    count: dict[str, int] = {"base_model.model.lm_head": 2 * N * w.hidden * w.vocabulary}
    for number in range(lowest, num_layers):
        layer, passes = LAYER.format(number), number > lowest  # in the lowest, nothing before the adapters is trained
        for name, wide, high in (
            ("mlp.gate_proj", w.hidden, w.inner),
            ("mlp.up_proj", w.hidden, w.inner),
            ("mlp.down_proj", w.inner, w.hidden),
            ("self_attn.o_proj", w.hidden, w.hidden),
        ):
            count[f"{layer}{name}"] = 2 * N * wide * high
        if passes:
            count[f"{layer}self_attn.k_proj"] = 2 * N * w.hidden * w.keys
        for name, high in (("q_proj", w.hidden), ("v_proj", w.keys)):
            if passes:
                count[f"{layer}self_attn.{name}.base_layer"] = 2 * N * w.hidden * high
            count[f"{layer}self_attn.{name}.lora_A.default"] = 2 * N * w.hidden * RANK * (1 + passes)
            count[f"{layer}self_attn.{name}.lora_B.default"] = 2 * N * RANK * high * 2
        # Scores again, and the gradients of queries, keys, values and weights: five products of T by T for each head.
        count[f"{layer}self_attn"] = 5 * 2 * B * w.heads * T * T * (w.hidden // w.heads)
    return count


def needed_bytes(num_layers: int, lowest: int) -> dict[str, int]:
    """Return the bytes that the forward keeps, by module, as above."""
    w = Widths()
    count: Counter[str] = Counter()
    for number in range(lowest, num_layers):
        layer, passes = LAYER.format(number), number > lowest
        if passes:  # a norm keeps its input and one number a row
            count[f"{layer}input_layernorm"] = N * (w.hidden + 1)
        count[f"{layer}self_attn.q_proj.lora_A.default"] = N * w.hidden  # the normed input, which the others read too
        for name in ("q_proj", "v_proj"):
            count[f"{layer}self_attn.{name}.lora_B.default"] = N * RANK
        # Queries, keys and values, attention's output, and the logarithm of each row's sum.
        count[f"{layer}self_attn"] = N * (w.hidden + 2 * w.keys + w.hidden + w.heads)
        count[f"{layer}post_attention_layernorm"] = N * (w.hidden + 1)
        count[f"{layer}mlp.act_fn"] = N * w.inner
        count[f"{layer}mlp"] = N * 2 * w.inner  # both factors of the gate
    # cos and sin of the positions, of which the first layer that turns anything counts one row for all examples.
    count[f"{LAYER.format(lowest)}self_attn"] += 2 * T * (w.hidden // w.heads)
    count["base_model.model.model.norm"] = N * (w.hidden + 1)
    found = {name: numbers * BYTES for name, numbers in count.items()}
    # The loss keeps the logarithms of all probabilities, the labels (64-bit), and how many count.
    return found | {"base_model.model": N * w.vocabulary * BYTES + N * 8 + BYTES}
