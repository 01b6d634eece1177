"""Engine metrics for a trainer's log, under the names of :mod:`sparsebp_cli.run.metric`.

An extra pass counts the FLOPs of a micro-batch, because the trainer computes its own ``total_flos`` from the size of
the input, without regard to skipped work.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed

from sparsebp_cli.backward import Engine, FlopCount, ModuleTrace, count_flops
from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.observe import internals
from sparsebp_cli.run import metric
from sparsebp_cli.worker.trial_step import Mode, TrialStep, freezes_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Trainer


def count_step(
    model: nn.Module, engine: Engine, inputs: Mapping[str, object], step: Callable[[Mapping[str, object]], object]
) -> dict[str, float]:
    """Count the FLOPs of a micro-batch, dense and with the policies, without effects on the training. ``step`` computes
    the loss of a copy of the inputs and differentiates it through the engine. Return metric values; none if part of the
    model is compiled, or if there are accumulated gradients, which would be lost."""
    if is_compiled(model) or any(parameter.grad is not None for parameter in model.parameters()):
        return {}
    counts: dict[Mode, FlopCount] = {}
    with TrialStep(model, engine, _forward, _backward) as trial:
        for mode in _modes(engine):
            with trial.on(mode), ModuleTrace(model) as trace, count_flops(trace) as counts[mode]:
                step(copy.copy(inputs))
    values = {
        metric.FORWARD_FLOPS.name: float(counts["policy"].forward.total()),
        metric.BACKWARD_EXECUTED.name: _backward_flops(counts["policy"]),
    }
    return values | ({metric.BACKWARD_DENSE.name: _backward_flops(counts["dense"])} if "dense" in counts else {})


@contextmanager
def restored_counters(trainer: Trainer) -> Iterator[None]:
    """Restore counters that another library's trainer stores in its attributes, such as the number of tokens."""
    before = {name: copy.deepcopy(value) for name, value in vars(trainer).items() if _is_counter(value)}
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(trainer).get(name) != value:
                setattr(trainer, name, value)


def _is_counter(value: object) -> bool:
    """Return whether a value is a number, or a container of only numbers."""
    if isinstance(value, Mapping):
        return all(_is_counter(one) for one in value.values())
    if isinstance(value, list | deque):
        return all(_is_counter(one) for one in value)
    return isinstance(value, int | float)


def _modes(engine: Engine) -> tuple[Mode, ...]:
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several and freezes_parameters(engine):  # DDP does not reduce parameters that were frozen when it was created
        return ("policy",)
    return ("dense", "policy")


def _backward_flops(count: FlopCount) -> float:
    return float(count.backward.total() + count.recomputed.total())


def is_compiled(model: nn.Module) -> bool:
    """Return whether part of a model is compiled. Under counters it would permanently stay uncompiled (torch 2.13)."""
    from torch._dynamo.eval_frame import OptimizedModule  # private; public torch names no class of compiled modules

    return any(isinstance(module, OptimizedModule) or internals.is_compiled(module) for module in model.modules())


def _forward() -> Tensor:
    raise AssertionError("only the trainer's own step may run the forward")


def _backward(_: Tensor) -> None:
    raise AssertionError("only the trainer's own step may run the backward")


def interval_values(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return the metrics since the last call, over ``num_steps`` optimizer steps; waits for the device."""
    return _values(engine.take_kept_share(), engine.take_chosen(), num_steps)


def total_values(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return the metrics since the model was attached, over ``num_steps`` optimizer steps; waits for the device."""
    return _values(*engine.totals(), num_steps)


def _values(kept_share: float | None, chosen: Chosen | None, num_steps: int) -> dict[str, float]:
    values = {metric.KEPT_SHARE: kept_share}
    if chosen is not None:
        values[metric.TRAINED_SHARE] = chosen.trained_share
        values[metric.CARRIED_SHARE] = chosen.carried_share
        seconds = float(chosen.scoring_seconds)
        values[metric.SCORING_SECONDS] = seconds / num_steps if seconds else None
    return {key.name: value for key, value in values.items() if value is not None}
