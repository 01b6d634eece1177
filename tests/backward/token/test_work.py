"""What is executed and stored is what was claimed: counted, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import Engine, ModuleTrace, PassCount, Proof, count_flops, saved_bytes
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.plan import speedup_limit
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.families import DECODERS

from .case import Batch, Marked, make_batch
from .test_families import decoder

MODES: tuple[Any, ...] = ("exact", "detach")


@contextmanager
def counted(model: nn.Module, engine: Engine, batch: Batch) -> Iterator[tuple[PassCount, DensePass]]:
    """Run a pass under counters."""
    model.zero_grad(set_to_none=True)
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = model(**batch.arguments).loss
        engine.backward(loss) if engine.enabled else loss.backward()
        yield PassCount(flops, saved), DensePass(loss, trace, flops)


def prove(model: nn.Module, batch: Batch, *policies: Any) -> Proof:
    """Run dense and with policies, and hold one against the other."""
    with sbp.attach(model, policies) as engine:
        model(**batch.arguments)
        with engine.disabled(), counted(model, engine, batch) as (dense, dense_pass):
            claims = [part.claim(dense_pass) for part in engine.extensions if "claim" in part.hooks]
        with engine.probing(), counted(model, engine, batch) as (policy, _):
            return Proof.of(model, dense, policy, engine.report(), claims)


def even(kind: str) -> Batch:
    """A batch whose examples have as many rows of each kind, so that nothing fills up."""
    batch, position = make_batch("prompt"), torch.arange(16).expand(3, -1)
    chosen = {
        "prompt": position >= 9,
        "scattered": position % 3 == 1,
        "two": (position == 4) | (position == 9),
        "cut": position < 6,
    }[kind]
    trained = chosen & (position < 15)
    return Batch(batch.inputs, trained, trained)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["prompt", "scattered", "two", "cut"])
@pytest.mark.parametrize("family", ["llama", "phi3", "phi", "gpt2", "olmo2", "gpt_neox", "gemma3_text"])
def test_what_is_executed_is_what_was_claimed_to_the_last_product(family: str, kind: str, mode: Any) -> None:
    proof = prove(decoder(family), even(kind), Marked(mode=mode))
    executed = proof.policy.flops
    assert sum(executed.forward.values()) == pytest.approx(proof.claimed_forward_flops, rel=1e-12)
    assert proof.claimed_flops == pytest.approx(executed.backward.total(), rel=1e-12)
    assert proof.excess_share == 0.0
    claimed = proof.claims[0]
    for name, flops in proof.dense.flops.backward.items():
        assert executed.backward[name] == pytest.approx(flops * claimed.backward.get(name, 1.0)), name


@pytest.mark.parametrize("family", DECODERS)
def test_what_remains_of_the_dense_backward_of_every_family_is_reported(family: str) -> None:
    model, batch = decoder(family), even("prompt")
    loss = model(**batch.inputs).loss
    with count_flops() as dense:
        loss.backward()
    with sbp.attach(model, [Marked(mode="detach")]) as engine:
        loss = model(**batch.arguments).loss
        with count_flops() as ours:
            engine.backward(loss)
        share = engine.report().whole_share
    assert share == pytest.approx(ours.total / dense.total, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_filled_up_rows_are_allowed_but_not_claimed(mode: Any) -> None:
    proof = prove(decoder("llama"), make_batch("prompts", "right"), Marked(mode=mode))
    assert proof.claimed_flops is not None
    assert proof.policy.flops.backward.total() > proof.claimed_flops
    assert proof.excess_share == 0.0
    assert proof.find_overclaim() is None


def test_the_ceiling_of_a_detached_prompt_is_that_of_its_rows() -> None:
    model = decoder("llama", vocab_size=64, num_hidden_layers=8)
    proof = prove(model, even("prompt"), Marked(mode="detach"))
    flops, share = proof.dense.flops, 6 / 16
    assert proof.claimed_flops is not None
    highest = speedup_limit(
        flops.forward.total(), flops.backward.total(), proof.claimed_flops, proof.claimed_forward_flops
    )
    assert 3 / (1 + 2 * share) < highest < 1.4 * 3 / (1 + 2 * share)  # more than its rows alone: last layer and head


def test_nothing_is_claimed_of_a_batch_that_is_trained_whole_or_not_yet_seen() -> None:
    model, batch = decoder("llama"), make_batch("prompt")
    whole = Batch(batch.inputs, torch.ones_like(batch.trained), torch.ones_like(batch.carries))
    proof = prove(model, whole, Marked(mode="detach"))
    assert proof.claims == (PassEstimate(),)
    assert proof.claimed_share == proof.executed_share == 1.0
    with sbp.attach(model, [Marked()]) as engine, engine.disabled(), counted(model, engine, batch) as (_, dense_pass):
        assert [part.claim(dense_pass) for part in engine.extensions if "claim" in part.hooks] == [PassEstimate()]


def test_claims_of_tokens_and_of_a_gradient_policy_are_multiplied() -> None:
    both = prove(
        decoder("llama"), even("prompt"), Marked(mode="detach"), sbp.make_policy("topk", keep=0.5, along="rows")
    )
    alone = prove(decoder("llama"), even("prompt"), Marked(mode="detach"))
    assert both.claimed_flops is not None
    assert alone.claimed_flops is not None
    assert both.claimed_flops < 0.7 * alone.claimed_flops
    assert both.policy.flops.backward.total() < 0.75 * alone.policy.flops.backward.total()
    assert both.excess_share == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpointed_layer_runs_again_for_carried_rows_alone(family: str, mode: Any) -> None:
    model = decoder(family)
    checkpoint_activations(model)
    proof = prove(model, even("scattered"), Marked(mode=mode))
    again = proof.policy.flops.recomputed.total()
    assert 0 < again < proof.dense.flops.recomputed.total()
    assert proof.excess_share == 0.0


def saved_by_layer(model: nn.Module, batch: Batch, mode: Any) -> list[int]:
    """Bytes saved for the backward, of each layer, and of all else at the end."""
    numbers = LayerNumbers(model)
    with sbp.attach(model, [Marked(mode=mode)]) as engine, ModuleTrace(model) as trace:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = model(**batch.arguments).loss
        engine.backward(loss)
    counts = [0] * (len(numbers.layers) + 1)
    for name, size in saved.by_module.items():
        number = numbers.number_of(name)
        counts[-1 if number is None else number] += size
    return counts


@pytest.mark.parametrize("kind", ["prompt", "scattered"])
def test_saved_activations_of_every_layer_fall_with_what_is_carried(kind: str) -> None:
    model = decoder("llama", num_hidden_layers=4)
    batch = make_batch("prompt", length=64)
    position = torch.arange(64).expand(3, -1)

    def chosen(num: int) -> Tensor:
        return (position >= 63 - num) & (position < 63) if kind == "prompt" else (position % (64 // num) == 1)

    by_keep = [saved_by_layer(model, Batch(batch.inputs, chosen(num), chosen(num)), "detach") for num in (32, 16, 4)]
    whole = torch.ones_like(batch.trained)
    dense = saved_by_layer(model, Batch(batch.inputs, whole, whole), "detach")
    for larger, smaller in zip([dense, *by_keep], by_keep, strict=False):
        assert all(few < many for few, many in zip(smaller, larger, strict=True))
    # Beside the carried rows a layer holds keys and values up to the last of them, of four heads where the kernel takes
    # a mask.
    rows = []
    for sizes, num in zip(by_keep, (32, 16, 4), strict=True):
        num_keys = int((chosen(num)[0, :63] * torch.arange(63)).max()) + 1
        rows.append((sizes[1] - 3 * 2 * num_keys * 32 * 4) / int(chosen(num)[0, :63].sum()))
    assert rows[1] == pytest.approx(rows[0], rel=0.05)
    assert rows[2] == pytest.approx(rows[0], rel=0.05)


def test_of_dropped_rows_nothing_is_left_after_the_forward() -> None:
    model, batch = decoder("llama"), make_batch("prompt", length=64)
    last = torch.arange(64).expand(3, -1) >= 59
    few = Batch(batch.inputs, last, last)
    exact, detach = (sum(saved_by_layer(model, few, mode)) for mode in MODES)
    assert detach < 0.4 * exact
