"""The memory of a real step of training, watched: one step of warm-up, and the last.

An update cannot be rehearsed without a copy of weights and state, so the step is training's own. Watching observes
alone, so the step's numbers are what they would be; but it is slower, so its time does not count: those of warm-up
count nowhere, and of any other step that is watched no time is told.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from sparsebp_cli.backward import Engine
from sparsebp_cli.memory import MemoryTrace, memory_trace
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, metric
from sparsebp_cli.run.memory import Phase
from sparsebp_cli.worker.peak import PeakMemory

Values = dict[str, float | None]
PHASES: dict[str, Phase] = {"forward": "forward", "backward": "backward", "optimizer": "update"}
TIMES = (
    metric.FORWARD_SECONDS,
    metric.BACKWARD_SECONDS,
    metric.OPTIMIZER_SECONDS,
    metric.STEP_SECONDS,
    metric.STEP_CPU_SECONDS,
    metric.TOKENS_PER_SECOND,
)
PARTS = (
    metric.PEAK_WEIGHT_BYTES,
    metric.PEAK_GRADIENT_BYTES,
    metric.PEAK_OPTIMIZER_BYTES,
    metric.PEAK_ACTIVATION_BYTES,
    metric.PEAK_WORKSPACE_BYTES,
)


@dataclass
class StepMemory:
    """Watches what is due.

    Args:
        recipe: Watched is where there are probes.
        journal: Receives the curve.
        model: Trained.
        engine: Attached to it.
        optimizer: Of its parameters.
        device: Of the model.
        peak: Left alone by what watching takes.
        watches: Whether this process does; of several, the first one.
    """

    recipe: Recipe
    journal: JournalWriter
    model: nn.Module
    engine: Engine
    optimizer: Any
    device: torch.device
    peak: PeakMemory
    watches: bool = True
    _trace: MemoryTrace | None = None

    def due(self, step: int) -> bool:
        """Return whether a step is watched.

        Args:
            step: Its number, from 1. From the second on there is an optimizer's state before the forward.

        Returns:
            Whether it is the last of warm-up, the second where there is no warm-up, or the last of all.
        """
        last = self.recipe.training.max_steps
        first = max(2, self.recipe.measure.warmup_steps)
        return self.watches and self.recipe.measure.probe_every is not None and step in (min(first, last), last)

    def watch(self, step: int, run: Callable[[], Values]) -> Values:
        """Make a step, and watch it if that is due.

        Args:
            step: Its number, from 1.
            run: Makes it, and returns metric values by name.

        Returns:
            Its values; of a step that is watched also those of its memory.
        """
        if not self.due(step):
            return run()
        gc.collect()  # else garbage of before goes in the middle of the step
        was_paused = self.peak.is_paused
        self.peak.pause()
        state = self.engine.state_dict()  # such as what error feedback will add
        with memory_trace(self.model, self.optimizer, also=state, device=self.device) as self._trace:
            del state
            values = run()
        trace, self._trace = self._trace, None
        self.peak.include(trace.allocator_peak_bytes or 0)
        if not was_paused:
            self.peak.resume()
        curve = trace.curve
        told = curve.to_values() | {"allocator_peak_bytes": trace.allocator_peak_bytes}
        self.journal.write("memory", step=step, values=told)
        if step > self.recipe.measure.warmup_steps:
            values |= {time.name: None for time in TIMES}
        split = curve.peak.split
        parts = zip(PARTS, astuple(split), strict=True)
        return values | {metric.STEP_PEAK_BYTES.name: float(split.total)} | {part.name: float(n) for part, n in parts}

    def begin(self, phase: str) -> None:
        """Say that a phase of the step begins.

        Args:
            phase: As the stopwatch names it.
        """
        if self._trace is not None:
            self._trace.begin(PHASES[phase])
