"""Peak memory of training itself, without the measurements between its steps."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory of the device, or of the process on a CPU, outside of pauses. On a CPU this reads Linux's ``/proc``;
    without it, pauses count as well. Memory that the C library keeps after a pause counts, because the process holds
    it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self._is_paused = device, 0, False

    def bytes(self) -> int:
        """Return the peak so far."""
        return self._before if self._is_paused else max(self._before, self._now())

    @property
    def is_paused(self) -> bool:
        """Whether memory is currently not counted."""
        return self._is_paused

    def include(self, num_bytes: int) -> None:
        """Count a peak in bytes that was measured during a pause."""
        self._before = max(self._before, num_bytes)

    def pause(self) -> None:
        """Stop counting."""
        self._before, self._is_paused = self.bytes(), True

    def resume(self) -> None:
        """Count again, from the memory in use now; without a pause, do nothing."""
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
            _RESET.write_text("5", encoding="ascii")  # proc(5): the peak starts again from what is in use now
        except OSError:
            return
