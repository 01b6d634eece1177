"""Eager update: the same weights as by a step after the backward, whatever is shared, checkpointed or accumulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsebp_cli as sbp
from tests.backward.eager_case import MODELS, OPTIMIZERS, Llama, assert_equal, train


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_state_after_12_steps_are_those_of_plain_pytorch_bitwise(name: str, optimizer: str) -> None:
    expected, _ = train(MODELS[name], OPTIMIZERS[optimizer], eager=False)
    found, engine = train(MODELS[name], OPTIMIZERS[optimizer], eager=True)
    assert_equal(found, expected)
    report = engine.eager.report
    if name in ("llama-reentrant", "gpt2-reentrant"):
        (tied,) = report.waited
        assert tied in ("inner.model.embed_tokens.weight", "inner.transformer.wte.weight")
    elif name in ("recurrent-reentrant", "branches-reentrant"):
        assert set(report.waited) == {"cell.weight", "cell.bias"}
    else:
        assert report.waited == ()
    assert report.num_early > 0


@pytest.mark.parametrize(
    "name",
    ["llama-tied", "branches", "branches-reentrant", "llama-checkpointed", "gpt2-checkpointed", "gpt2-reentrant"],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_exact_clipping_and_accumulation_give_the_bits_of_pytorch(name: str, accumulation: int) -> None:
    def compute(eager: bool) -> tuple[dict[str, Tensor], Any]:
        return train(MODELS[name], steps=4, accumulation=accumulation, max_norm=0.05, eager=eager)

    (expected, _), (found, engine) = compute(False), compute(True)
    assert_equal(found, expected)
    report = engine.eager.report
    assert report.gradient_norm > 0.05  # so it was clipped
    shared = {"branches-reentrant": 2, "gpt2-reentrant": 1}.get(name, 0)
    assert len(report.waited) == (shared if accumulation == 1 else len(list(MODELS[name]().parameters())))


@pytest.mark.parametrize("name", ["llama-tied", "recurrent-reentrant"])
def test_accumulated_gradients_are_updated_by_their_sum_in_the_last_pass(name: str) -> None:
    expected, _ = train(MODELS[name], steps=4, accumulation=3, eager=False)
    found, engine = train(MODELS[name], steps=4, accumulation=3, eager=True)
    assert_equal(found, expected)
    assert engine.now().index == 4


def test_a_policy_decides_alike_in_both_passes_of_exact_clipping() -> None:
    policies = [sbp.make_policy("random", keep=0.5, along="rows")]
    expected, plain = train(Llama, eager=False, steps=4, policies=policies, max_norm=0.05)
    found, engine = train(Llama, eager=True, steps=4, policies=policies, max_norm=0.05)
    assert_equal(found, expected)
    assert replace(engine.report(), notes=()) == plain.report()  # what was looked at first is not counted


@pytest.mark.compiles
def test_compiled_parts_and_autocast_get_the_weights_of_the_deferred_step() -> None:
    class Compiled(Llama):
        def __init__(self) -> None:
            super().__init__(num_hidden_layers=1)
            self.inner.model.layers[0].mlp.compile(backend="aot_eager")

        def forward(self, step: int) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(step)

    expected, _ = train(Compiled, eager=False, steps=3)
    found, engine = train(Compiled, eager=True, steps=3)
    assert_equal(found, expected)
    assert engine.eager.report.waited == ()


@pytest.mark.parametrize("segments", [2, 3])
def test_segments_get_the_weights_of_plain_pytorch(segments: int) -> None:
    def make() -> Llama:
        return Llama(num_hidden_layers=3, tie_word_embeddings=True)

    expected, _ = train(make, eager=False, steps=4, max_norm=0.05)
    found, engine = train(make, eager=True, steps=4, max_norm=0.05, segments=segments)
    assert_equal(found, expected)
    assert engine.eager.report.waited == ()


def test_parameters_that_are_frozen_in_turn_keep_their_state() -> None:
    options = {"policies": [sbp.make_policy("frozen", turn="layers")], "steps": 5}
    expected, _ = train(Llama, eager=False, **options)
    found, _ = train(Llama, eager=True, **options)
    assert_equal(found, expected)


@pytest.mark.parametrize("execution", ["fast", "reference"])
def test_a_router_that_leaves_parameters_out_leaves_them_as_they_were(execution: str) -> None:
    options = {"policies": [sbp.make_policy("max-child")], "sites": "nodes", "steps": 3, "execution": execution}
    expected, _ = train(Llama, eager=False, **options)
    found, attached = train(Llama, eager=True, **options)
    assert_equal(found, expected)
    assert attached.eager.report.num_early < len(list(Llama().parameters()))
