"""The FLOPs that one micro-batch of a training really executes, counted beside it.

The trainer's own ``total_flos`` follows from the size of the input, whatever the backward skips.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import distributed

from sparsebp_cli.backward import Engine, FlopCount, ModuleTrace, count_flops
from sparsebp_cli.run import metric
from sparsebp_cli.worker.rehearsal import Rehearsal, Way
from sparsebp_cli.worker.trainable import freezes

if TYPE_CHECKING:
    from torch import Tensor, nn


def count_step(
    model: nn.Module, engine: Engine, inputs: Mapping[str, Any], step: Callable[[Any], Any]
) -> dict[str, float]:
    """Run a forward and backward under counters, dense and with the policies, and leave no trace of it.

    Args:
        model: That is trained, as the trainer calls it.
        engine: Attached to it.
        inputs: The micro-batch; a copy is handed on, for a loss may take things out of it.
        step: Computes the loss of a micro-batch and differentiates it through the engine.

    Returns:
        Metric values by name; empty where something is compiled, or there are gradients already, which would be lost.
    """
    if is_compiled(model) or any(parameter.grad is not None for parameter in model.parameters()):
        return {}
    counts: dict[Way, FlopCount] = {}
    with Rehearsal(model, engine, _forward, _backward) as rehearsal:
        for way in _ways(engine):
            with rehearsal.on(way, feedback=False), ModuleTrace(model) as trace, count_flops(trace) as counts[way]:
                step(copy.copy(inputs))
    values = {
        metric.FORWARD_FLOPS.name: float(counts["policy"].forward.total()),
        metric.BACKWARD_EXECUTED.name: _backward_flops(counts["policy"]),
    }
    return values | ({metric.BACKWARD_DENSE.name: _backward_flops(counts["dense"])} if "dense" in counts else {})


def _ways(engine: Engine) -> tuple[Way, ...]:
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several and freezes(engine):  # DDP waits for no gradient of what was frozen when it was made
        return ("policy",)
    return ("dense", "policy")


def _backward_flops(count: FlopCount) -> float:
    return float(count.backward.total() + count.recomputed.total())


def is_compiled(model: nn.Module) -> bool:
    """Whether anything in a model is compiled: counters would keep it uncompiled for good (torch 2.13)."""
    from torch._dynamo.eval_frame import OptimizedModule  # no public name

    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())  # noqa: SLF001 - the same


def _forward() -> Tensor:
    raise AssertionError("the trainer's own step runs the forward")


def _backward(_: Tensor) -> None:
    raise AssertionError("the trainer's own step runs the backward")
