"""One-line messages and exit codes for exceptions that end a run."""

from __future__ import annotations

import torch

from sparsebp_cli.errors import DivergedError, SparseBPError, UsageError
from sparsebp_cli.worker.checkpoint import is_disk_full


def describe_failure(error: Exception) -> tuple[str, int]:
    """Return one line for a user who did not write the code, and the worker's exit code: 2 if the recipe must change, 3
    if the run diverged, 1 otherwise."""
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
    peak = ""
    if torch.cuda.is_available():
        peak = f" (peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated)"
    advice = "smaller per_device_train_batch_size or max_seq_length, or backward.checkpointing: full"
    return f"out of memory{peak}: {text.splitlines()[0]}; try a {advice}"
