"""FLOPs that one micro-batch of a training executes, counted in an extra pass.

The trainer's own ``total_flos`` is computed from the size of the input, whatever the backward skips.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import distributed

from sparsebp_cli.backward import Engine, FlopCount, ModuleTrace, count_flops
from sparsebp_cli.run import metric
from sparsebp_cli.worker.trainable import freezes_parameters
from sparsebp_cli.worker.trial_step import Mode, TrialStep

if TYPE_CHECKING:
    from torch import Tensor, nn


def count_step(
    model: nn.Module, engine: Engine, inputs: Mapping[str, Any], step: Callable[[Any], Any]
) -> dict[str, float]:
    """Count a forward and backward of a micro-batch, dense and with the policies, without a trace in the training.
    ``step`` computes the loss of a copy of the inputs and differentiates it through the engine. Return metric values,
    none if part of the model is compiled or if there are accumulated gradients, which would be lost."""
    if is_compiled(model) or any(parameter.grad is not None for parameter in model.parameters()):
        return {}
    counts: dict[Mode, FlopCount] = {}
    with TrialStep(model, engine, _forward, _backward) as trial:
        for mode in _modes(engine):
            with trial.on(mode, feedback=False), ModuleTrace(model) as trace, count_flops(trace) as counts[mode]:
                step(copy.copy(inputs))
    values = {
        metric.FORWARD_FLOPS.name: float(counts["policy"].forward.total()),
        metric.BACKWARD_EXECUTED.name: _backward_flops(counts["policy"]),
    }
    return values | ({metric.BACKWARD_DENSE.name: _backward_flops(counts["dense"])} if "dense" in counts else {})


def _modes(engine: Engine) -> tuple[Mode, ...]:
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several and freezes_parameters(engine):  # DDP does not reduce parameters that were frozen when it was created
        return ("policy",)
    return ("dense", "policy")


def _backward_flops(count: FlopCount) -> float:
    return float(count.backward.total() + count.recomputed.total())


def is_compiled(model: nn.Module) -> bool:
    """Return whether part of a model is compiled; under counters it would stay uncompiled for good (torch 2.13)."""
    from torch._dynamo.eval_frame import OptimizedModule  # private; public torch names no class of compiled modules

    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())  # noqa: SLF001 - the same


def _forward() -> Tensor:
    raise AssertionError("the trainer's own step runs the forward")


def _backward(_: Tensor) -> None:
    raise AssertionError("the trainer's own step runs the backward")
