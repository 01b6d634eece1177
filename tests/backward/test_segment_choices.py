"""Segments beside the other choices of a step: policies, eager update, autocast, adapters, compiling, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from benchmarks.live_bytes import live_bytes
from sparsebp_cli.policy import Rows, Selection, Site, Step
from tests.backward.test_policy_state import Momentum
from tests.selector import Promises

from .conftest import filled_cache, tokens
from .segment_case import (
    NUM_LAYERS,
    ROWS,
    Recurrent,
    assert_same,
    gradients_of,
    loss_of,
    make_model,
    recurrent_loss,
    run,
)

SEEN: list[tuple[str, int]] = []


class Watcher(Promises):
    """Notes where it is asked, keeps the first row."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        SEEN.append((site.name, step.call))
        return Rows(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("model", [make_model, Recurrent])
def test_a_policy_is_asked_once_at_each_site_in_the_order_of_the_backward(model: Any) -> None:
    loss = loss_of if model is make_model else recurrent_loss
    order = []
    for options in ({}, {"segments": 3}):
        SEEN.clear()
        run(model(), [Watcher()], loss, **options)
        order.append(list(SEEN))
    assert order[0] == order[1]
    assert len(set(SEEN)) == len(SEEN)


@pytest.mark.parametrize(
    "options",
    [
        {"sites": "linears"},
        {"sites": "linears", "execution": "reference"},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_policies_give_the_same_gradients_with_segments(options: dict[str, Any], family: str) -> None:
    rates = {"attn_pdrop": 0.0} if family == "gpt2" else {}
    whole = run(make_model(family, **rates), [ROWS], **options)
    assert_same(run(make_model(family, **rates), [ROWS], segments=2, **options), whole)
    dense = run(make_model(family, **rates))
    assert any(not torch.equal(whole[name], dense[name]) for name in dense)


TOGETHER: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "frozen in turn": ([sbp.make_policy("frozen", turn="layers")], {}),
    "frozen in turn, eager": ([sbp.make_policy("frozen", turn="layers")], {"update": "eager"}),
    "rows, eager": ([ROWS], {"update": "eager"}),
    "eager, clipped": ([], {"update": "eager", "max_grad_norm": 0.1, "eager_clip": "exact"}),
    "examples": ([sbp.make_policy("selective-backprop", keep=0.5)], {"num_steps": 4}),
    "momentum": ([Momentum()], {}),
}


@pytest.mark.parametrize(
    ("name", "shares"),
    [*((name, False) for name in TOGETHER), *((name, True) for name in ("rows, eager", "eager, clipped", "momentum"))],
)
def test_other_choices_train_the_same_weights_with_segments(name: str, shares: bool) -> None:
    """Bitwise for gpt2; to rounding for a stack that shares all its weights, which has neither layers nor labels."""
    policies, options = TOGETHER[name]

    def train(**more: Any) -> list[Tensor]:
        model = Recurrent() if shares else make_model("gpt2")
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        with sbp.attach(model, policies, optimizer=optimizer, seed=3, **options, **more) as engine:
            for step in range(4):
                engine.backward(recurrent_loss(model) if shares else loss_of(model, step))
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    tolerance = 1e-5 if shares else 0.0
    torch.testing.assert_close(train(segments=2), train(), rtol=tolerance, atol=tolerance)


def test_autocast_is_the_same_in_the_second_run() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    assert_same(run(make_model(), loss=loss, segments=3), run(make_model(), loss=loss))

    def loss_in_autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # which keeps casts of weights, also those without a graph
            return recurrent_loss(model)

    plain = run(Recurrent(), loss=loss_in_autocast)
    for name, grad in run(Recurrent(), loss=loss_in_autocast, segments=3).items():
        torch.testing.assert_close(grad, plain[name], rtol=2e-2, atol=2e-2)


def _adapted() -> nn.Module:
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_are_trained_though_the_first_input_needs_no_gradient() -> None:
    torch.manual_seed(5)
    plain = run(_adapted())
    torch.manual_seed(5)
    assert sum(grad is not None for grad in plain.values()) == NUM_LAYERS * 14
    assert_same(run(_adapted(), segments=2), plain)


def test_a_disabled_engine_is_dense_in_the_same_segments() -> None:
    plain = run(make_model("gpt2"))
    model = make_model("gpt2")
    with sbp.attach(model, [ROWS], segments=2) as engine, live_bytes(model.parameters()) as live:
        torch.manual_seed(1)
        with engine.disabled():
            loss = loss_of(model)
            held = live.now
            loss.backward()
        assert_same(gradients_of(model), plain)
    with live_bytes(model.parameters()) as live:
        loss_of(model)
    assert held < 0.6 * live.peak


def test_evaluation_and_generation_are_the_models_own() -> None:
    model, ids = make_model(), tokens(0, batch=1, length=6)
    plain = model.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with sbp.attach(model, [], segments=3), torch.no_grad():
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), plain)
        (cache,) = filled_cache(model, ids).values()
        assert cache.get_seq_length() == 6


@pytest.mark.compiles
@pytest.mark.parametrize("what", ["parts of layers", "model"])
def test_compiled_parts_of_layers_and_compiled_models_give_the_same_gradients(what: str) -> None:
    model, plain = make_model(), run(make_model())
    for layer in model.model.layers if what != "model" else ():
        layer.mlp.compile(backend="aot_eager")
    called: Any = torch.compile(model, backend="aot_eager") if what == "model" else model
    with sbp.attach(model, [], segments=3) as engine:
        for number in (0, 1):  # compiled in the first, used in the second
            model.zero_grad()
            engine.backward(loss_of(called, 0))
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-6, msg=f"{number} {name}")
