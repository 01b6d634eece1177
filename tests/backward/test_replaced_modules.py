"""A module that was replaced after the model was attached is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.backward.patch.forward import ModulePlaces
from sparsebp_cli.errors import UsageError
from tests.backward.families import tiny_decoder

from .conftest import tokens

POLICIES: list[Any] = [
    {"name": "topk", "keep": 0.5, "along": "rows"},
    {"name": "lossless", "verify": "never"},
    {"name": "tokens", "score": "random", "keep": 0.5},
    {"name": "wta-crs", "keep": 0.5},
    {"name": "dropbp", "keep": 0.5},
    {"name": "frozen", "turn": "layers"},
]


def _resize(model: Any) -> None:
    model.resize_token_embeddings(80)


def _replace_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 64, bias=False)


@pytest.mark.parametrize("change", [_resize, _replace_head])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
def test_a_new_head_is_named(policy: Any, change: Callable[[Any], None]) -> None:
    model: Any = tiny_decoder("llama", vocab_size=64)
    ids = tokens(0).clamp(max=63)
    batch = {"input_ids": ids, "labels": torch.where(torch.arange(ids.shape[1]) < 4, -100, ids)}
    with sbp.attach(model, policy, optimizer=torch.optim.SGD(model.parameters(), 0.1)) as engine:
        change(model)
        with pytest.raises(UsageError, match="'lm_head' was replaced after the model was attached"):
            engine.backward(model(**batch).loss)
    with sbp.attach(model, policy, optimizer=torch.optim.SGD(model.parameters(), 0.1)) as engine:
        engine.backward(model(**batch).loss)


def test_what_wraps_a_module_is_no_replacement() -> None:
    model: Any = tiny_decoder("llama", vocab_size=64)
    places = ModulePlaces(model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    places.check()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UsageError, match=r"'model.layers.1' was replaced"):
        places.check()
