"""Measure the peak memory of a run, and on a CPU the peak of the tensors of two of its steps."""

from __future__ import annotations

import gc
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from sparsebp_cli.backward import Engine
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.worker.storage import plain_tensors, tensors_in

Values = dict[str, float | None]
TIMES = (
    metric.FORWARD_SECONDS,
    metric.BACKWARD_SECONDS,
    metric.OPTIMIZER_SECONDS,
    metric.STEP_SECONDS,
    metric.STEP_CPU_SECONDS,
    metric.TOKENS_PER_SECOND,
)
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory of the device, or of the process on a CPU, outside pauses. On a CPU this reads Linux's ``/proc``;
    without it, pauses count too. Memory that the C library keeps after a pause counts, because the process holds it."""

    device: torch.device
    is_paused: bool

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self.is_paused = device, 0, False

    def bytes(self) -> int:
        """Return the peak so far."""
        return self._before if self.is_paused else max(self._before, self._now())

    def pause(self) -> None:
        self._before, self.is_paused = self.bytes(), True

    def resume(self) -> None:
        """Count again, starting with the memory in use now. Do nothing without a pause."""
        if self.is_paused:
            self._reset()
            self.is_paused = False

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


@dataclass
class StepPeak:
    """Measures the peak of live tensor bytes in the last step of warm-up and in the last of all, on a CPU, whose
    allocator keeps no peak. The profiler changes no number of these steps, but makes them slower: the warm-up has no
    times anyway, and those of the last step are left out. Memory of the profiler does not count towards ``peak``."""

    recipe: Recipe
    model: nn.Module
    engine: Engine
    optimizer: AcceleratedOptimizer
    peak: PeakMemory
    watches: bool = True  # False on all ranks but the first

    def due(self, step: int) -> bool:
        """Return whether to measure a step (from 1). The first step is never measured unless it is the only one,
        because optimizers create their state in it."""
        last = self.recipe.training.max_steps
        first = max(2, self.recipe.measure.warmup_steps)
        watches = self.watches and self.peak.device.type == "cpu" and not self.recipe.training.compile
        return watches and self.recipe.measure.probe_every is not None and step in (min(first, last), last)

    def watch(self, step: int, run: Callable[[], Values]) -> Values:
        """Make a step and return its metrics, including its peak if it is measured."""
        if not self.due(step):
            return run()
        gc.collect()  # otherwise garbage from before the step would be freed during it
        was_paused = self.peak.is_paused
        self.peak.pause()
        values, num_bytes = measure_live_peak(run, self._standing())
        if not was_paused:
            self.peak.resume()
        if step > self.recipe.measure.warmup_steps:
            values |= {time.name: None for time in TIMES}
        return values | {metric.STEP_PEAK_BYTES.name: float(num_bytes)}

    def _standing(self) -> Iterator[Tensor]:
        """Yield the tensors that exist before a step: weights, the parts of quantised ones, gradients, and states of
        the optimizer and of policies."""
        trained = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        for tensor in (*self.model.parameters(), *self.model.buffers(), *trained):
            yield from tensors_in([tensor, tensor.grad if tensor.is_leaf else None, dict(vars(tensor))])
        yield from tensors_in([dict(self.optimizer.state), self.engine.state_dict()])


_GONE = "sparsebp::gone::"


def measure_live_peak(run: Callable[[], Values], standing: Iterable[Tensor]) -> tuple[Values, int]:
    """Run a step and return its result with the peak of live bytes in PyTorch's CPU allocator.

    Args:
        run: Makes the step.
        standing: Tensors from before the step that count; the allocator has no record of them.

    Returns:
        What ``run`` returned, and the bytes.
    """
    live: dict[int, int] = {}
    watched = []
    for tensor in standing:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            if storage.data_ptr() not in live:
                live[storage.data_ptr()] = storage.nbytes()
                # The allocator records no releases of blocks from before the record.
                watched.append(weakref.finalize(storage, _note_release, storage.data_ptr()))
            del storage, plain
        del tensor
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise kineto logs its start and end to stderr
    try:
        # acc_events: without it PyTorch 2.11 warns, from the second profile on, that events are cleared.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
            values = run()
    finally:
        for reference in watched:
            reference.detach()
    assert record.profiler is not None
    total = most = sum(live.values())
    for address, num_bytes in _read_changes(record.profiler.kineto_results):
        total -= live.pop(address, 0)
        if num_bytes > 0:
            live[address] = num_bytes
            total += num_bytes
            most = max(most, total)
    return values, most


def _note_release(address: int) -> None:
    with record_function(f"{_GONE}{address}"):
        pass


def _read_changes(results: Any) -> list[tuple[int, int]]:
    """Return address and bytes of each allocation in order, and of each release with bytes that are not positive. The
    class of the profiler's event tree is not public."""
    found: list[tuple[int, int, int]] = []
    todo = list(results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(_GONE):
            found.append((event.start_time_ns, int(event.name.removeprefix(_GONE)), 0))
    found.sort(key=lambda change: change[0])
    return [(address, num_bytes) for _, address, num_bytes in found]
