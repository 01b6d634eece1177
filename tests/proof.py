"""What a policy's extension claims of a pass, beside what the pass executes with and without the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import DensePass, ModuleTrace, PassCount, Proof, count_flops, saved_bytes


def prove(model: nn.Module, engine: sbp.Engine, forward: Callable[[], Tensor], *, checkpointing: bool) -> Proof:
    """Return the proof of an engine whose extension claims less than 0.85 of a pass; assert that it is exact.

    Args:
        model: Attached, with one extension that claims.
        engine: Its engine.
        forward: Runs the model on one batch, and returns the loss.
        checkpointing: Whether layers are computed again, of which a claim has only the upper end.
    """
    extension: Any = next(part for part in engine.extensions if hasattr(part, "claim"))

    def count(backward: Any) -> tuple[PassCount, DensePass]:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            with saved_bytes(model.parameters(), trace) as saved:
                loss = forward()
            backward(loss)
        return PassCount(flops, saved), DensePass(loss, trace, flops)

    with engine.probing():
        engine.backward(forward())
        with engine.disabled():
            dense, graph = count(torch.Tensor.backward)
        claims = [extension.claim(graph)]
        ours, _ = count(engine.backward)
        proof = Proof.of(model, dense, ours, engine.report(), claims)
    assert proof.excess_share == 0.0
    assert proof.policy.flops.forward.total() == pytest.approx(proof.claimed_forward_flops, rel=1e-12)
    if not checkpointing:
        assert proof.executed_share == pytest.approx(proof.claimed_share, rel=1e-12)
    assert proof.claimed_share is not None
    assert proof.claimed_share < 0.85
    return proof
