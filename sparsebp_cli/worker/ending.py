"""The end of a worker: stop requests by signals, and the line and exit code of a failure.

SIGTERM and SIGINT stop the worker at the next step boundary, a second SIGINT at once. torch is imported only when a
failure is described, because workers set its environment first.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from typing import Self

from sparsebp_cli.errors import DivergedError, SparseBPError, UsageError


@dataclass
class StopRequest:
    """The first stop signal that the process received, None if there was none."""

    signal: signal.Signals | None = None

    @classmethod
    def install(cls) -> Self:
        """Handle SIGTERM and SIGINT from now on, and return the request that the handler fills in."""
        request = cls()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, request._receive)
        return request

    def _receive(self, number: int, *_: object) -> None:
        if self.signal is not None and number == signal.SIGINT:
            os._exit(130)
        self.signal = self.signal or signal.Signals(number)


def stop_message(number: signal.Signals, step: int) -> str:
    """Return the final line of a run that a signal stopped after a step."""
    return f"{number.name}: stopped after step {step}"


def pause_message(step: int) -> str:
    """Return the final line of a run that its recipe stopped after a step."""
    return f"checkpoint.stop_at: stopped after step {step}"


def signal_of_message(text: str) -> signal.Signals | None:
    """Return the signal that a line of :func:`stop_message` names; None for any other line."""
    name = text.partition(":")[0]
    return signal.Signals[name] if name in signal.Signals.__members__ else None


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that the disk is full. safetensors has the system's error number in its message."""
    return getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC})" in str(error)


def describe_failure(error: Exception) -> tuple[str, int]:
    """Return one line for a user who did not write the code, and the worker's exit code: 2 if the recipe must change, 3
    if the run diverged, 1 otherwise."""
    import torch

    if isinstance(error, DivergedError):
        return f"diverged: {error}", 3
    if isinstance(error, SparseBPError):
        return str(error).replace("\n", " "), 2 if isinstance(error, UsageError) else 1
    if isinstance(error, torch.OutOfMemoryError):
        return _out_of_memory(str(error)), 1
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return _out_of_memory(str(error)), 1
    if is_disk_full(error):
        return "the disk is full; make room, then resume: the last checkpoint is intact", 1
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}", 1


def _out_of_memory(text: str) -> str:
    import torch

    peak = ""
    if torch.cuda.is_available():
        peak = f" (peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated)"
    advice = "smaller per_device_train_batch_size or max_seq_length, or backward.checkpointing: full"
    return f"out of memory{peak}: {text.splitlines()[0]}; try a {advice}"
