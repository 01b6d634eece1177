"""`within: example` chooses within each example, or is refused by name where rows cannot be told apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError

from .conftest import FAMILIES, tiny_model, tokens

WITHIN = sbp.make_policy("topk", keep=0.25, within="example")
_OPT = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_SHARED = FAMILIES["llama"] | {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}


def _model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).train()


def _best(grad_NO: Tensor, num_examples: int, keep: int) -> Tensor:
    """The definition: from the rows of each example, those of largest norm."""
    mask = torch.zeros(len(grad_NO), dtype=torch.bool)
    for rows in torch.arange(len(grad_NO)).view(num_examples, -1):
        mask[rows[grad_NO[rows].norm(dim=1).topk(keep).indices]] = True
    return mask


def test_opt_with_all_rows_in_one_dimension_keeps_the_same_number_of_each_example() -> None:
    model, ids = (
        _model("opt", **_OPT, word_embed_proj_dim=16, max_position_embeddings=32, dropout=0.0),
        tokens(0, 3, 12),
    )
    layer, seen = model.model.decoder.layers[0], {}
    for name in ("fc1", "fc2"):
        getattr(layer, name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    loss = model(input_ids=ids, labels=ids).loss
    # transformers 5.17 to 5.23 gives both linears all rows in one dimension.
    grad2 = torch.autograd.grad(loss, seen["fc2"], retain_graph=True)[0].reshape(36, -1)
    mask2 = _best(grad2, 3, 3)
    kept2 = (grad2 * mask2[:, None]).view(seen["fc2"].shape)
    grad1 = torch.autograd.grad(seen["fc2"], seen["fc1"], kept2)[0].reshape(36, -1)
    mask1 = _best(grad1, 3, 3)
    model = copy.deepcopy(model)
    layer = model.model.decoder.layers[0]
    with sbp.attach(model, [WITHIN], exclude=["lm_head"]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(layer.fc2.bias.grad, (grad2 * mask2[:, None]).sum(0))
    torch.testing.assert_close(layer.fc1.bias.grad, (grad1 * mask1[:, None]).sum(0))
    assert not torch.equal(mask2, _best(grad2, 1, 9))  # of all rows together it would be others


def test_a_shared_expert_with_joined_rows_is_told_apart_by_example() -> None:
    model, ids, shown = _model("qwen2_moe", **_SHARED), tokens(0, 3, 12), {}

    class Shapes(type(WITHIN)):  # type: ignore[misc]
        def select(self, grad_NO: Tensor, site: Any, step: Any) -> Any:
            shown[site.name.rpartition(".mlp.")[2]] = site.batch_shape
            return super().select(grad_NO, site, step)

    with sbp.attach(model, [Shapes(**dict(WITHIN))], exclude=["lm_head"]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
    shared = {name: shape for name, shape in shown.items() if name.startswith("shared_expert")}
    assert shared == dict.fromkeys(
        ["shared_expert_gate", "shared_expert.down_proj", "shared_expert.up_proj", "shared_expert.gate_proj"], (3, 12)
    )


class _Joined(nn.Module):
    """Gives its linear all rows in one dimension, after something that may change their order."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 4), nn.Linear(4, 2), change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.change(self.first(x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flatten(0, 1)[torch.randperm(15)],
        lambda x: x.transpose(0, 1).reshape(-1, 4),
        lambda x: x.transpose(0, 1),
        lambda x: x.flatten(0, 1).cumsum(0),
    ],
)
def test_rows_whose_order_is_not_proved_are_refused_by_the_name_of_the_site(change: Any) -> None:
    model = _Joined(change)
    with (
        sbp.attach(model, [WITHIN]) as engine,
        pytest.raises(
            UnsupportedError,
            match="'within: example' cannot tell which example each gradient row of 'second' belongs to",
        ),
    ):
        engine.backward(model(torch.randn(3, 5, 4)).square().sum())
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.25)]) as engine:  # within the batch it does not matter
        engine.backward(model(torch.randn(3, 5, 4)).square().sum())
    with sbp.attach(model, [WITHIN], exclude=["second"]) as engine:
        engine.backward(model(torch.randn(3, 5, 4)).square().sum())


@pytest.mark.parametrize("length", [5, 3])
def test_positions_before_examples_are_refused_by_name(length: int) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
    with sbp.attach(model, [WITHIN]) as engine, pytest.raises(UnsupportedError, match="batch_first=False"):
        engine.backward(model(torch.randn(length, 3, 8)).square().sum())
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    with sbp.attach(model, [WITHIN]) as engine:
        engine.backward(model(torch.randn(3, length, 8)).square().sum())


def test_chosen_examples_are_the_batch_that_sites_see() -> None:
    model, ids = tiny_model("llama"), tokens(0, batch=4)
    policies = [sbp.make_policy("uniform", keep=0.5, start=0.0, end=1.0, interrupt=0), WITHIN]
    with sbp.attach(model, policies, num_steps=1) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        assert engine.report().kept_share == 0.125


def test_no_hook_is_left_after_detaching() -> None:
    model = tiny_model("llama")
    with sbp.attach(model, [WITHIN]):
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
