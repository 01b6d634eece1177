"""Seconds of the phases of a step, with the device synchronised at each boundary, and the load of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums seconds by phase."""

    device: torch.device

    def __init__(self, device: torch.device, at_phase: Callable[[str], None] | None = None) -> None:
        """Start at zero. The device is synchronised before each reading of the clock; ``at_phase`` is called with each
        phase when it begins."""
        self.device, self._at_phase = device, at_phase
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        """Return the clock in seconds after synchronising the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def cpu_now(self) -> float:
        """Return the CPU seconds of all threads of this process after synchronising the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        if self._at_phase is not None:
            self._at_phase(phase)
        start = self.now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.now() - start


def read_load() -> float | None:
    """Return the 1-minute load average over the number of CPUs of the machine; None where the system has none."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None
