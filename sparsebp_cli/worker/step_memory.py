"""Memory traces of two real training steps: one of warm-up and the last.

An update cannot be tried without a copy of weights and optimizer state, so the traced steps belong to the training.
The profiler changes none of their numbers, but makes them slower: warm-up times count nowhere, and the times of any
other traced step are not recorded.
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
from sparsebp_cli.worker.peak_memory import PeakMemory

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
class StepMemoryRecorder:
    """Records the memory of the steps that are due and writes the curve to the journal. Memory of the profiler itself
    does not count towards ``peak``."""

    recipe: Recipe
    journal: JournalWriter
    model: nn.Module
    engine: Engine
    optimizer: Any
    device: torch.device
    peak: PeakMemory
    watches: bool = True  # False on all ranks but the first
    _trace: MemoryTrace | None = None

    def due(self, step: int) -> bool:
        """Return whether to trace a step (from 1): the last of warm-up and the last of all. The first step is never
        traced unless it is the only one, because optimizers create their state in it."""
        last = self.recipe.training.max_steps
        first = max(2, self.recipe.measure.warmup_steps)
        return self.watches and self.recipe.measure.probe_every is not None and step in (min(first, last), last)

    def watch(self, step: int, run: Callable[[], Values]) -> Values:
        """Make a step and return its metrics, including those of its memory if it is traced."""
        if not self.due(step):
            return run()
        gc.collect()  # or garbage from before the step would be freed in the middle of it
        was_paused = self.peak.is_paused
        self.peak.pause()
        state = self.engine.state_dict()  # tensors such as error feedback, to be attributed in the trace
        with memory_trace(self.model, self.optimizer, also=state, device=self.device) as self._trace:
            del state
            values = run()
        trace, self._trace = self._trace, None
        self.peak.include(trace.allocator_peak_bytes or 0)
        if not was_paused:
            self.peak.resume()
        curve = trace.curve
        content = curve.to_values() | {"allocator_peak_bytes": trace.allocator_peak_bytes}
        self.journal.write("memory", step=step, values=content)
        if step > self.recipe.measure.warmup_steps:
            values |= {time.name: None for time in TIMES}
        split = curve.peak.split
        parts = zip(PARTS, astuple(split), strict=True)
        return values | {metric.STEP_PEAK_BYTES.name: float(split.total)} | {part.name: float(n) for part, n in parts}

    def begin(self, phase: str) -> None:
        """Mark the begin of a phase, by the stopwatch's name for it."""
        if self._trace is not None:
            self._trace.begin(PHASES[phase])
