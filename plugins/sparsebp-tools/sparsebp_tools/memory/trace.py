"""Traces the memory of one training step over time, split by purpose, for any model and loop.

    with memory_trace(model, optimizer) as trace:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trace.peak.split.activations, trace.curve.points, trace.save("memory.png")

Every byte from PyTorch's allocator is counted, also inside operators. Memory that libraries allocate themselves (packed
matrices, thread buffers) is not counted. Tensors from before the step count if they are weights, gradients or optimizer
state, if the forward saves them, or if ``also`` contains them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_tools.memory.curve import PHASES, MemoryCurve, MemoryPoint, Phase
from sparsebp_tools.memory.profiler_record import MemoryRecord
from sparsebp_tools.memory.watch import MemoryWatch


class MemoryTrace:
    """The trace of one step, created by :func:`memory_trace`. Use it once, as a context manager around the step."""

    def __init__(self, model: nn.Module, optimizer: object, also: object, device: torch.device) -> None:
        self._record = MemoryRecord(device)
        self._watch = MemoryWatch(self._record, model, optimizer, also)
        self._device = device
        self._stack, self._is_open = ExitStack(), False
        self._curve: MemoryCurve | None = None
        self._allocator_peak: int | None = None

    def __enter__(self) -> Self:
        """Start the trace. Existing weights, gradients and optimizer state count from the beginning.

        Returns:
            The trace, whose results are available after the block.

        Raises:
            UsageError: A profiler is running, or this trace was used before.
        """
        if self._curve is not None:
            raise UsageError("this trace was used already: create another one with memory_trace()")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._stack.enter_context(self._record)
        self._stack.enter_context(self._watch)
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the trace. After an error the curve ends there."""
        self._is_open = False
        self._stack.__exit__(kind, error, trace)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._allocator_peak = int(torch.cuda.memory_stats(self._device)["allocated_bytes.all.peak"])
        self._curve = self._record.take_curve()

    def begin(self, phase: Phase) -> None:
        """Mark the start of a phase. Without marks, phases are inferred from backward nodes and ``Optimizer.step``.

        Args:
            phase: ``forward``, ``backward`` or ``update``.

        Raises:
            UsageError: The phase is unknown, or the block is not active.
        """
        if phase not in PHASES:
            raise UsageError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        if not self._is_open:
            raise UsageError("call begin() inside the with block of memory_trace()")
        self._record.begin(phase)

    @property
    def curve(self) -> MemoryCurve:
        """Live bytes over time, by purpose.

        Raises:
            UsageError: The block has not ended.
        """
        if self._curve is None:
            raise UsageError("the trace has no results yet: read them after the with block of memory_trace()")
        return self._curve

    @property
    def peak(self) -> MemoryPoint:
        """The first moment with the most live bytes."""
        return self.curve.peak

    @property
    def allocator_peak_bytes(self) -> int | None:
        """The peak that CUDA's allocator reports for the step, for comparison with the split; None on a CPU.

        It includes earlier tensors that belong to no part.
        """
        return self._allocator_peak

    def save(self, path: str | Path) -> Path:
        """Draw the curve.

        Args:
            path: The file, ``.png``, ``.svg`` or ``.pdf``; it is overwritten.

        Returns:
            The path.

        Raises:
            UsageError: The suffix is not one of these, the folder does not exist, or the block has not ended.
        """
        from sparsebp_tools.memory.picture import save_curves

        return save_curves([("", self.curve)], Path(path))


def memory_trace(
    model: nn.Module, optimizer: object = None, *, also: object = None, device: torch.device | str | None = None
) -> MemoryTrace:
    """Trace the memory of one training step: forward, backward, update. The step's results do not change.

    Args:
        model: Its parameters and buffers are the weights.
        optimizer: The optimizer whose state is reported; None if there is none, or its state counts as workspace.
        also: Other tensors from before the step, or containers and objects with tensors, to count as workspace: a
            teacher's weights, an average of the weights.
        device: The device to trace; None for that of the model's first parameter.

    Returns:
        A context manager for the step.

    Raises:
        UsageError: ``model`` is not a module, or the device does not exist.
        UnsupportedError: The device is neither a CPU nor CUDA, or the optimizer is not a torch optimizer.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module, got {type(model).__name__}")
    first = next(model.parameters(), None)
    try:
        where = torch.device(device) if device is not None else torch.device("cpu") if first is None else first.device
    except (RuntimeError, TypeError):
        raise UsageError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}") from None
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"memory can be traced on cpu and cuda, got {where.type}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device must be a device of this machine, got {str(where)!r}")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return MemoryTrace(model, optimizer, also, torch.device("cpu") if where.type == "cpu" else where)
