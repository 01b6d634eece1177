"""Examples of unequal length stand one after the other where filling them up would cost more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsebp_cli as sbp
from sparsebp_cli.backward.decoder.decoder import find_decoder
from sparsebp_cli.backward.kind.token import row_plan as planning
from sparsebp_cli.backward.kind.token.row_plan import PositionMask, make_plan
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .case import Batch, Marked, assert_near, make_batch, step
from .test_families import decoder
from .test_work import prove


def marks_of(batch: Batch) -> PositionMask:
    """Return what is known of a batch without padding, with every position a target."""
    every = torch.ones_like(batch.trained)
    return PositionMask(every, every, batch.trained, batch.carries, torch.zeros(len(every), 1, dtype=torch.bool))


def unequal() -> Batch:
    """A prompt of nearly the whole example in two of them, of nearly nothing in the third."""
    batch, position = make_batch("prompt"), torch.arange(16).expand(3, -1)
    chosen = (position >= torch.tensor([14, 1, 12])[:, None]) & (position < 15)
    return Batch(batch.inputs, chosen, chosen)


@pytest.mark.parametrize("mask", ["none", "left", "right", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2", "phi3"])
def test_joined_examples_equal_the_reference(family: str, mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_joining_pays", lambda *_, **__: True)
    for options in ({}, {"attn_implementation": "eager"}):
        model = decoder(family, **options)
        for name in ("scattered", "prompts"):
            batch = make_batch(name, mask)
            assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))


def test_equal_examples_stay_beside_each_other_and_unequal_ones_are_joined() -> None:
    cost = find_decoder(decoder("llama")).pair_cost
    for batch, is_joined in ((make_batch("prompt"), False), (unequal(), True)):
        labels = batch.inputs["labels"]
        assert make_plan(marks_of(batch), labels, "detach", cost).is_joined == is_joined
        assert not make_plan(marks_of(batch), labels, "exact", cost).is_joined


def test_where_attention_is_all_they_are_not_joined() -> None:
    batch = make_batch("prompts")
    for cost, is_joined in ((0.0, True), (100.0, False)):
        assert make_plan(marks_of(batch), batch.inputs["labels"], "detach", cost).is_joined == is_joined


def test_linears_of_joined_examples_multiply_chosen_rows_alone() -> None:
    proof = prove(decoder("llama"), unequal(), Marked(mode="detach"))
    num_rows = 1 + 14 + 3
    for name in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
        dense, executed = proof.dense.flops.backward[name], proof.policy.flops.backward[name]
        assert executed == dense * num_rows // 48
    assert proof.excess_share == 0.0


def test_a_checkpointed_layer_of_joined_examples_gives_the_same_gradient() -> None:
    stored = step(decoder("llama"), unequal(), "detach")
    model = decoder("llama")
    checkpoint_activations(model)
    assert_near(step(model, unequal(), "detach"), stored, 1e-6)


def test_a_batch_of_one_example_is_never_joined() -> None:
    one = make_batch("scattered", batch=1)
    cost = find_decoder(decoder("llama")).pair_cost
    assert not make_plan(marks_of(one), one.inputs["labels"], "detach", cost).is_joined
    with sbp.attach(decoder("llama"), [Marked(mode="detach")]) as engine:
        assert engine.report().chosen is None
