"""A module that was replaced after the model was attached is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers.loss.loss_utils
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


def _double(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return 2 * nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _replace_loss(model: Any) -> None:
    model.loss_function = _double


def _choose_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("policy", "change", "what"),
    [
        ({"name": "lossless"}, _replace_loss, "'loss_function' was replaced"),
        ({"name": "tokens", "score": "random", "keep": 0.5, "mode": "exact"}, _replace_loss, "'loss_function' was"),
        ({"name": "tokens", "score": "random", "keep": 0.5, "mode": "detach"}, _replace_loss, "'loss_function' was"),
        ({"name": "lossless"}, _choose_attention, "the attention implementation was changed"),
    ],
)
def test_another_loss_or_attention_is_named_after_a_step_and_taken_by_a_new_engine(
    policy: Any, change: Callable[[Any], None], what: str
) -> None:
    model: Any = tiny_decoder("llama", vocab_size=64)
    ids = tokens(0).clamp(max=63)
    batch = {"input_ids": ids, "labels": torch.where(torch.arange(ids.shape[1]) < 4, -100, ids)}
    with sbp.attach(model, policy) as engine:
        engine.backward(model(**batch).loss)
        change(model)
        with pytest.raises(UsageError, match=f"{what}.*after the model was attached"):
            model(**batch)
    if change is _choose_attention:
        assert model.config._attn_implementation == "eager"
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    with sbp.attach(model, policy) as engine:
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
