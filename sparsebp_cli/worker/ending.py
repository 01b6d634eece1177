"""Handle the end of a worker: stop requests by signals, and the line and exit code of a failure.

SIGTERM and SIGINT stop the worker at the next step boundary, a second SIGINT at once. This module must not import
torch, because workers set its environment first.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from dataclasses import dataclass
from typing import Self

from sparsebp_cli.errors import (
    DivergedError,
    SparseBPError,
    UsageError,
    explain_system_error,
    first_line,
    is_out_of_memory,
)

FULL = {errno.ENOSPC, errno.EDQUOT}
DIVERGED = 3  # the worker's exit code if a loss or gradient is not finite


@dataclass
class StopRequest:
    """The first stop signal that the process received; None if there was none."""

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


def name_refusal(error: BaseException) -> tuple[str, str] | None:
    """Return what the disk refused and what to do before resuming the run; None for other errors."""
    found = re.search(r"os error (\d+)\)", str(error))  # safetensors includes the system's error number in its message
    number = getattr(error, "errno", None) or (int(found[1]) if found else 0)
    reason, colon, remedy = explain_system_error(OSError(number, "")).partition(": ")
    if not colon:
        return None
    return reason, "make room, then resume" if number in FULL else f"{remedy}; then resume"


def describe_failure(error: Exception) -> tuple[str, int]:
    """Return one line for a user who did not write the code, and the worker's exit code: 2 if the recipe must change, 3
    if the run diverged, 1 otherwise."""
    if isinstance(error, DivergedError):
        return f"diverged: {error}", DIVERGED
    if isinstance(error, SparseBPError):
        return str(error).replace("\n", " "), 2 if isinstance(error, UsageError) else 1
    if is_out_of_memory(error):
        return _describe_memory(error), 1
    if refusal := name_refusal(error):
        name = getattr(error, "filename", None)
        place = f" ({name})" if name else ""
        return f"{refusal[0]}{place}: {refusal[1]}; the last checkpoint is intact", 1
    first, name = first_line(error), type(error).__name__
    return name if first == name else f"{name}: {first}", 1


def _describe_memory(error: Exception) -> str:
    peak, said = "", first_line(error)
    torch = sys.modules.get("torch")  # importing it now would need memory
    if torch is not None and torch.cuda.is_available():
        peak = f" (peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated)"
    advice = "smaller per_device_train_batch_size or max_seq_length, or backward.checkpointing: full"
    return f"out of memory{peak}{'' if said == type(error).__name__ else f': {said}'}; try a {advice}"
