"""Trace the memory of two real training steps: one of warm-up and the last.

An update cannot be tried without a copy of weights and optimizer state, so the traced steps belong to the training. The
profiler changes none of their numbers, but makes them slower. Warm-up times never count, and the times of the other
traced step are not recorded.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from sparsebp_cli.backward import Engine, Route
from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.observe.saved_bytes import tensor_bytes
from sparsebp_cli.memory import MemoryTrace, memory_trace
from sparsebp_cli.memory.storage import plain_tensors, tensors_in
from sparsebp_cli.policy import GradientSelector, Policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, metric
from sparsebp_cli.run.memory import Phase
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import local_part

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
    """Records the memory of the steps that are due and writes the curve to the event log. Memory of the profiler itself
    does not count towards ``peak``."""

    recipe: Recipe
    journal: JournalWriter
    model: nn.Module
    engine: Engine
    optimizer: AcceleratedOptimizer
    device: torch.device
    peak: PeakMemory
    watches: bool = True  # False on all ranks but the first
    _trace: MemoryTrace | None = None

    def due(self, step: int) -> bool:
        """Return whether to trace a step (from 1): the last step of warm-up and the last of all. The first step is
        never traced unless it is the only one, because optimizers create their state in it."""
        last = self.recipe.training.max_steps
        first = max(2, self.recipe.measure.warmup_steps)
        # Otherwise the trace's hooks on saved tensors would be compiled into the graph.
        watches = self.watches and not self.recipe.training.compile
        return watches and self.recipe.measure.probe_every is not None and step in (min(first, last), last)

    def watch(self, step: int, run: Callable[[], Values]) -> Values:
        """Make a step and return its metrics, including those of its memory if it is traced."""
        if not self.due(step):
            return run()
        gc.collect()  # otherwise garbage from before the step would be freed during it
        was_paused = self.peak.is_paused
        self.peak.pause()
        state = self.engine.state_dict()  # tensors such as error feedback, for attribution in the trace
        with memory_trace(self.model, self.optimizer, also=state, device=self.device) as self._trace:
            # Otherwise this name would keep tensors alive that the step replaces.
            del state
            values = run()
        trace, self._trace = self._trace, None
        self.peak.include(trace.allocator_peak_bytes or 0)
        if not was_paused:
            self.peak.resume()
        curve = trace.curve
        content = curve.to_values() | {"allocator_peak_bytes": trace.allocator_peak_bytes}
        self.journal.write("memory", step=step, values=content)
        # The trace slows the step down; readers always leave out warm-up times.
        if step > self.recipe.measure.warmup_steps:
            values |= {time.name: None for time in TIMES}
        split = curve.peak.split
        parts = zip(PARTS, astuple(split), strict=True)
        return values | {metric.STEP_PEAK_BYTES.name: float(split.total)} | {part.name: float(n) for part, n in parts}

    def begin(self, phase: str) -> None:
        """Mark the start of a phase, given by the stopwatch's name for it."""
        if self._trace is not None:
            self._trace.begin(PHASES[phase])


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory of the device, or of the process on a CPU, outside pauses. On a CPU this reads Linux's ``/proc``;
    without it, pauses count too. Memory that the C library keeps after a pause counts, because the process holds it."""

    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self._is_paused = device, 0, False

    def bytes(self) -> int:
        """Return the peak so far."""
        return self._before if self._is_paused else max(self._before, self._now())

    @property
    def is_paused(self) -> bool:
        """Whether counting is paused."""
        return self._is_paused

    def include(self, num_bytes: int) -> None:
        """Count a peak in bytes that was measured during a pause."""
        self._before = max(self._before, num_bytes)

    def pause(self) -> None:
        self._before, self._is_paused = self.bytes(), True

    def resume(self) -> None:
        """Count again, starting with the memory in use now. Do nothing without a pause."""
        if self._is_paused:
            self._reset()
            self._is_paused = False

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _RESET.write_text("5", encoding="ascii")  # proc(5): the peak restarts from the memory in use now
        except OSError:
            return


def memory_metrics(model: nn.Module, optimizer: AcceleratedOptimizer, peak: PeakMemory) -> dict[str, float]:
    """Return the bytes of weights and optimizer state on this rank, and its peak memory since the run began. Weights
    include the tensors that the optimizer trains instead of them, and the scales of quantised weights."""
    state = tensors_in(dict(optimizer.state))
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameters = {id(parameter): parameter for parameter in (*model.parameters(), *trained)}.values()
    weights = (part for each in parameters for part in (*plain_tensors(local_part(each)), *tensors_in(vars(each))))
    name = metric.PEAK_ALLOCATED_BYTES if peak.device.type == "cuda" else metric.PEAK_RESIDENT_BYTES
    return {
        metric.WEIGHT_BYTES.name: float(tensor_bytes(weights)),
        metric.OPTIMIZER_BYTES.name: float(tensor_bytes(local_part(value) for value in state)),
        name.name: float(peak.bytes()),
    }


def kept_share(own: float | None, ranks: Ranks) -> float | None:
    """Return the mean fraction of gradient entries kept over all ranks, which have equally many rows; None if no
    gradient arrived on any rank."""
    if ranks.count == 1:
        return own
    total, known = ranks.all_sum([own or 0.0, float(own is not None)])
    return total / known if known else None


def route_metrics(route: Route | None) -> dict[str, float | None]:
    """Return how far a router let a step's gradient propagate; empty without a router."""
    if route is None:
        return {}
    return {
        metric.NODES.name: route.num_nodes / route.num_backwards,
        metric.NODES_RUN.name: route.nodes_reached,
        metric.PARAMETERS_REACHED.name: float(len(route.parameters)),
        metric.MISS_RATE.name: route.miss_rate,
    }


def epoch_metrics(epoch: tuple[int, float] | None) -> dict[str, float | None]:
    """Return the number of the current epoch and the fraction of the examples that it visits; empty if no policy
    chooses epochs."""
    if epoch is None:
        return {}
    return {metric.EPOCH.name: float(epoch[0]), metric.VISITED_SHARE.name: epoch[1]}


def selection_metrics(chosen: Chosen | None, ranks: Ranks, policies: Sequence[Policy]) -> dict[str, float | None]:
    """Return fractions and scoring time of the tokens or examples selected before the forward, over all ranks. Without
    a gradient policy the fraction trained is also the fraction kept."""
    if chosen is None:
        return {}
    counts = (chosen.trained, chosen.targets, chosen.carried, chosen.real)
    trained, targets, carried, real = ranks.all_sum([float(count) for count in counts])
    trained_share = trained / targets if targets else None
    values = {
        metric.TRAINED_SHARE.name: trained_share,
        metric.CARRIED_SHARE.name: carried / real if real else None,
        metric.SCORING_SECONDS.name: ranks.all_max([float(chosen.scoring_seconds)])[0],
    }
    if any(isinstance(policy, GradientSelector) for policy in policies):
        return values
    return values | {metric.KEPT_SHARE.name: trained_share}
