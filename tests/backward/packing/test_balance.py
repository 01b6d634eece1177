"""The loss that balances experts, over the computed rows: that of the plain padded step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import sparsebp_cli as sbp
from sparsebp_audit.auditor.script_packing import count_leftover
from sparsebp_cli.errors import UnsupportedError

from .case import SOME, count_flops, error, errors, gradients, make_batch
from .test_sequence import SIZES, collate, make_texts

EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,  # so large that an error in it is seen
    "output_router_logits": True,
}
MODELS: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**EXPERTS, num_local_experts=4)),
}


def make_model(name: str = "mixtral") -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = MODELS[name]()
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_with_balance_are_those_of_the_plain_step(name: str) -> None:
    assert errors(make_model(name), SOME) == {}


def test_without_a_mask_every_position_counts_as_in_the_plain_step() -> None:
    batches = {which: make_batch(*which) for which in (("none", "completion", "groups"), ("none", "last", "tree"))}
    for batch in batches.values():
        del batch["attention_mask"]
    assert errors(make_model(), batches, lambda *which: batches[which]) == {}


def test_the_balance_is_that_of_each_example_alone_weighed_by_its_positions() -> None:
    """The oracle: routers' logits of one example at a time, and the function of transformers over all of them."""
    model, batch = make_model(), make_batch("right", "completion", "groups")
    routers: list[tuple[Tensor, ...]] = []
    for row in range(len(batch["input_ids"])):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        routers.append(model(input_ids=ids[None]).router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
    expected = load_balancing_loss_func(layers, 4, 2)
    grads = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        found = model(**batch).aux_loss
        own = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
        assert "100 in a shared prefix" in engine.notes["packing"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    pairs = [(a, b) for a, b in zip(grads, own, strict=True) if a is not None and b is not None and a.any()]
    assert len(pairs) > 5
    assert error([a for a, _ in pairs], [b for _, b in pairs]) < 1e-6


def test_positions_behind_the_last_label_are_computed_since_their_routers_are_read() -> None:
    model, batch = make_model(), make_batch("right", "last", "none")
    with sbp.attach(model, "lossless") as engine:
        gradients(model, engine, batch)
        assert " 0 after the last label" in engine.notes["packing"]
        assert "of the last layer's" not in engine.notes["packing"]
    found = count_leftover(model, batch)
    assert found is not None
    assert found.unread == 0


def test_a_loss_of_ones_own_balances_by_routers_of_the_output() -> None:
    """Without labels: logits, routers and the model's balance have the plain shapes."""
    model, batch = make_model(), make_batch("right", "completion", "groups")
    labels, mask = batch.pop("labels"), batch["attention_mask"]

    def step(engine: Any) -> tuple[Tensor, list[Tensor]]:
        output = model(**batch)
        read = labels[:, 1:] != -100
        loss = torch.nn.functional.cross_entropy(output.logits[:, :-1][read], labels[:, 1:][read])
        loss = loss + load_balancing_loss_func(output.router_logits, 4, 2, mask) + output.aux_loss
        (loss.backward if engine is None else lambda: engine.backward(loss))()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return loss.detach(), grads

    plain_loss, plain = step(None)
    with sbp.attach(model, "lossless") as engine:
        engine.columns(labels=labels)
        loss, grads = step(engine)
        assert "skipped" in engine.notes["packing"]
    assert error(plain, grads) < 1e-6
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)


def test_texts_in_a_row_balance_over_the_whole_row() -> None:
    model = make_model()
    batch = collate(make_texts(), pad_to_multiple_of=64) | {"use_cache": False}
    loss, expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        own, grads = gradients(model, engine, batch)
        assert "40 in a shared prefix" in engine.notes["packing"]
    assert error(expected, grads) < 1e-6
    assert float(own) == pytest.approx(float(loss), rel=1e-6)


def test_an_evaluation_has_the_balance_in_its_loss() -> None:
    model, batch = make_model(), make_batch("right", "completion", "groups")
    with torch.no_grad():
        expected = model(**batch).loss
        with sbp.attach(model, "lossless") as engine, engine.scoring(reads="loss"):
            found = model(**batch).loss
            assert "skipped" in engine.notes["packing without a gradient"]
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_a_balanced_step_costs_the_rows_that_are_computed() -> None:
    model, batch = make_model(), make_batch("right", "completion", "groups")
    plain = count_flops(model, None, batch)
    with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
        own = count_flops(model, engine, batch)
    assert own < 0.5 * plain  # 46 % of the rows, and 29 % of the head's


def test_noise_of_routers_is_refused_with_a_way_out() -> None:
    model = make_model()
    model.config.router_jitter_noise = 0.1
    with pytest.raises(UnsupportedError, match=r"lossless needs router_jitter_noise to be 0 or False"):
        sbp.attach(model, "lossless")
