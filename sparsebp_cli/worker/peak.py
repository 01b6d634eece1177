"""The peak of memory that training itself needs: what is measured beside it does not count."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Highest use of a device's memory, or of the process's on a CPU, outside of pauses.

    On a CPU that needs Linux's ``/proc``; without it, pauses count as well. Memory that the C library keeps after a
    pause counts too, for the process has it.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self._is_paused = device, 0, False

    def bytes(self) -> int:
        """Return the peak so far."""
        return self._before if self._is_paused else max(self._before, self._now())

    @property
    def is_paused(self) -> bool:
        """Whether nothing counts now."""
        return self._is_paused

    def include(self, num_bytes: int) -> None:
        """Count what was measured apart in a pause.

        Args:
            num_bytes: The peak in it.
        """
        self._before = max(self._before, num_bytes)

    def pause(self) -> None:
        """Do not count what follows."""
        self._before, self._is_paused = self.bytes(), True

    def resume(self) -> None:
        """Count again; without a pause, nothing changes."""
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
