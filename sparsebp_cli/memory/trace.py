"""PUBLIC. What memory one training step takes, moment by moment and in its parts; for any model and loop.

    with sbp.memory_trace(model, optimizer) as trace:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trace.peak.split.activations, trace.curve.points, trace.save("memory.png")

Every byte that PyTorch's allocator gives out is accounted for, also inside of operators. What libraries take by
themselves (packed matrices, threads' buffers) is not, nor what was there before and is no weight, gradient or state,
unless the forward saves it or ``also`` names it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.memory.profiler_record import MemoryRecord
from sparsebp_cli.memory.watch import MemoryWatch
from sparsebp_cli.run.memory import PHASES, MemoryCurve, MemoryPoint, Phase


class MemoryTrace:
    """One step, traced. Made by :func:`memory_trace`; a context manager around the step, once."""

    def __init__(self, model: nn.Module, optimizer: Any, also: Any, device: torch.device) -> None:
        self._record = MemoryRecord(device)
        self._watch = MemoryWatch(self._record, model, optimizer, also)
        self._device = device
        self._stack, self._is_open = ExitStack(), False
        self._curve: MemoryCurve | None = None
        self._allocator_peak: int | None = None

    def __enter__(self) -> Self:
        """Begin. Gradients and state that are there are counted from now on.

        Returns:
            The trace, of which the figures are there after the block.

        Raises:
            UsageError: A profiler is at work, or this trace was used before.
        """
        if self._curve is not None:
            raise UsageError("this trace has its step: make another one by memory_trace()")
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
        """End; a step that failed has its curve up to there."""
        self._is_open = False
        self._stack.__exit__(kind, error, trace)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._allocator_peak = int(torch.cuda.memory_stats(self._device)["allocated_bytes.all.peak"])
        self._curve = self._record.take_curve()

    def begin(self, phase: Phase) -> None:
        """Say that a phase begins. If nobody does, phases are told from what runs: nodes, and ``Optimizer.step``.

        Args:
            phase: ``forward``, ``backward`` or ``update``.

        Raises:
            UsageError: There is no such phase, or this is not inside of the block.
        """
        if phase not in PHASES:
            raise UsageError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        if not self._is_open:
            raise UsageError("a phase begins inside of the trace's block")
        self._record.begin(phase)

    @property
    def curve(self) -> MemoryCurve:
        """Live bytes from the first moment to the last, in parts.

        Raises:
            UsageError: The block has not ended.
        """
        if self._curve is None:
            raise UsageError("the trace has its figures when its block has ended")
        return self._curve

    @property
    def peak(self) -> MemoryPoint:
        """The first moment at which most is live."""
        return self.curve.peak

    @property
    def allocator_peak_bytes(self) -> int | None:
        """The peak that CUDA's allocator tells of the same step, beside which the split can be held; None on a CPU.

        It also has what was there before and belongs to no part.
        """
        return self._allocator_peak

    def save(self, path: str | Path) -> Path:
        """Draw the curve.

        Args:
            path: Where to; ``.png``, ``.svg`` or ``.pdf``. It is replaced.

        Returns:
            The path.

        Raises:
            UsageError: The ending is another one, the folder does not exist, or the block has not ended.
        """
        from sparsebp_cli.run.memory_picture import save_curves

        return save_curves([("", self.curve)], Path(path))


def memory_trace(
    model: nn.Module, optimizer: Any = None, *, also: Any = None, device: torch.device | str | None = None
) -> MemoryTrace:
    """Trace the memory of one training step: forward, backward, update. The step's numbers stay what they are.

    Args:
        model: Whose parameters and buffers are the weights.
        optimizer: Whose state is told; None: there is none, or it stays in the workspace.
        also: Tensors, or lists, dicts and objects with tensors, that are there before the step, are none of the above
            and shall count as workspace: a teacher's weights, an average of the weights.
        device: Whose memory; None: that of the model's first parameter.

    Returns:
        A context manager for the step.

    Raises:
        UsageError: ``model`` is no module, or there is no such device.
        UnsupportedError: The device is neither a CPU nor CUDA, or the optimizer is none of PyTorch's kind.
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
        raise UsageError(f"device must be one of this machine's, got {str(where)!r}")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return MemoryTrace(model, optimizer, also, torch.device("cpu") if where.type == "cpu" else where)
