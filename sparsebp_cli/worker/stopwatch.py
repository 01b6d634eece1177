"""Measure the seconds of a step and its phases, and the machine's load.

On a CUDA device the phase borders are events in its stream, read once at the end of the step. If the device were
synchronised at each border, it would wait for the host to launch the next phase.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums seconds by phase, for a step that starts with the stopwatch."""

    device: torch.device

    def __init__(self, device: torch.device) -> None:
        """Start at zero."""
        self.device = device
        self._spans: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._start, self._cpu_start = self._mark(), time.process_time()

    def now(self) -> float:
        """Return the clock in seconds after synchronising the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside the block to a phase."""
        start = self._mark()
        yield
        self._spans.append((phase, start, self._mark()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase and of the whole ``step``, and as ``step_cpu`` the CPU seconds of all
        threads of this process. This waits for the device once."""
        end = self._mark()
        if not isinstance(end, float):
            end.synchronize()
        seconds: dict[str, float] = {}
        for phase, start, stop in self._spans:
            seconds[phase] = seconds.get(phase, 0.0) + _between(start, stop)
        step_cpu = time.process_time() - self._cpu_start
        return seconds | {"step": _between(self._start, end), "step_cpu": step_cpu}

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(stop, float):
        assert isinstance(start, float) and isinstance(stop, float)  # noqa: PT018 - of one device
        return stop - start
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1e3


def read_load() -> float | None:
    """Return the 1-minute load average over the machine's number of CPUs; None if the system has no load average."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None
