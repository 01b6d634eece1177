"""What branches claim is what they execute, what they keep is less, and dense they are PyTorch's own backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sparsebp_cli as sbp
from sparsebp_cli.asset.checkpointing import checkpoint_activations
from sparsebp_cli.backward import count_flops, saved_bytes
from sparsebp_cli.policy import GradientSelector

from .branch_case import IDS, assert_same, step
from .conftest import tokens
from .families import DECODERS, every_way, tiny_decoder
from .test_branch_model import lora


def _executed(make: Callable[[], nn.Module], policy: GradientSelector | None, **options: Any) -> tuple[float, float]:
    """Return FLOPs of one backward: executed by all of the model, and claimed at the branches."""
    model = make()
    with sbp.attach(model, [policy] if policy else [], sites="branches", **options) as engine:
        loss = model(input_ids=IDS, labels=IDS).loss
        with count_flops() as count:
            engine.backward(loss)
        return count.total, engine.claim().claimed_flops


@pytest.mark.parametrize("within", ["example", "batch"])
@pytest.mark.parametrize("family", ["phi", "llama", "gpt_neox", "gpt2", "phi3", "gemma2", "olmo2"])
def test_what_is_claimed_is_what_is_executed(family: str, within: str) -> None:
    """With multi-head, grouped and fused attention; attention by matrix products, which can be counted."""
    options = {"attn_implementation": "eager"} | ({"attn_pdrop": 0.0} if family == "gpt2" else {})

    def make() -> nn.Module:
        return tiny_decoder(family, **options)

    dense, claimed_dense = _executed(make, None)
    head = dense - claimed_dense
    for keep, kept in itertools.product((0.25, 0.5), ("none", "sparse")):
        policy = sbp.make_policy("topk", keep=keep, along="rows", within=within)
        executed, claimed = _executed(make, policy, checkpointing=kept)
        least = _executed(make, None, execution="reference")[0]
        assert least == dense
        if within == "example":
            assert executed - head == pytest.approx(claimed, rel=1e-6), (keep, kept)
            assert executed < dense or kept == "sparse"
        else:  # examples are filled up to the one with most rows
            assert claimed <= executed - head


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_what_is_claimed_of_adapters_is_what_is_executed() -> None:
    def make() -> nn.Module:
        return lora(tiny_decoder("llama", attn_implementation="eager"), 0.0)

    dense, claimed_dense = _executed(make, None)
    for kept in ("none", "sparse"):
        policy = sbp.make_policy("topk", keep=0.25, along="rows", within="example")
        executed, claimed = _executed(make, policy, checkpointing=kept)
        assert executed - (dense - claimed_dense) == pytest.approx(claimed, rel=1e-6), kept


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_computed_again_whole_is_claimed_as_such(family: str) -> None:
    options = {"attention_dropout": 0.1} if family == "llama" else {}

    def make() -> nn.Module:
        return tiny_decoder(family, attn_implementation="eager", **options)

    dense, claimed_dense = _executed(make, None)
    policy = sbp.make_policy("topk", keep=0.25, along="rows", within="example")
    executed, claimed = _executed(make, policy, checkpointing="sparse")
    assert executed - (dense - claimed_dense) == pytest.approx(claimed, rel=1e-6)


@pytest.mark.parametrize("kept", ["none", "sparse"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "phi3"])
def test_less_is_kept_for_the_backward_than_autograd_keeps(family: str, kept: str) -> None:
    options = {"attn_pdrop": 0.0} if family == "gpt2" else {}
    sizes = []
    for policy in (None, sbp.make_policy("topk", keep=0.25, along="rows")):
        model = tiny_decoder(family, **options)
        with sbp.attach(model, [policy] if policy else [], sites="branches", checkpointing=kept):
            with saved_bytes(model.parameters()) as saved:
                loss = model(input_ids=IDS, labels=IDS).loss
            sizes.append(saved.total)
            assert loss.requires_grad
    assert sizes[1] < {"none": 0.75, "sparse": 0.5}[kept] * sizes[0]


def _peak(family: str, keep: float | None) -> int:
    """Return the most bytes that lay in tensors at once in one step: with sparse recompute, or checkpointed."""
    size = {"n_layer": 6, "n_embd": 128, "attn_pdrop": 0.0, "n_positions": 256} if family == "gpt2" else _SIZE
    model = tiny_decoder(family, attn_implementation="sdpa", **size)
    if keep is None:
        checkpoint_activations(model)
    policies = [] if keep is None else [sbp.make_policy("topk", keep=keep, along="rows")]
    engine = sbp.attach(model, policies, sites="branches", checkpointing="none" if keep is None else "sparse")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = tokens(3, batch=2, length=256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        engine.backward(model(input_ids=ids, labels=ids).loss)
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


_SIZE = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 344}


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "phi3"])
def test_the_peak_is_not_above_that_of_checkpointing_all_layers(family: str) -> None:
    assert _peak(family, 0.25) <= _peak(family, None)


@pytest.mark.always("gpt2", "llama", "gemma3_text", "phi")
@pytest.mark.parametrize("family", DECODERS)
def test_dense_at_branches_is_plain_pytorch_to_the_last_bit(family: str) -> None:
    for make in every_way(family):
        plain = step(make(), None, plain=True, inputs=[{}, {}])
        for policy in (None, sbp.make_policy("dense"), sbp.make_policy("topk", keep=1.0)):
            assert_same(step(make(), policy, inputs=[{}, {}]), plain, 0.0)
