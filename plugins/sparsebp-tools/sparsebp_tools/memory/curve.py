"""Split live bytes over one training step into five parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["weights", "gradients", "optimizer", "activations", "workspace"]
Phase = Literal["forward", "backward", "update"]
PARTS: tuple[Part, ...] = get_args(Part)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class MemorySplit:
    """Live bytes at one moment. Every storage belongs to one part and counts once.

    Args:
        weights: Parameters, trained or not, and buffers.
        gradients: Tensors that are or become the ``.grad`` of a parameter.
        optimizer: Tensors of the optimizer's state.
        activations: Activations saved for backward, while they are alive; also in a forward that the backward
            recomputes.
        workspace: All other allocations of the step: results that nothing saved, intermediate gradients, temporaries of
            operators and of the optimizer.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class MemoryPoint:
    """Live bytes between one allocation or release and the next.

    Args:
        seconds: Time since the step began. The traced step is slower than other steps.
        phase: Part of the step: forward, backward or update.
        split: Live bytes by purpose.
    """

    seconds: float
    phase: Phase
    split: MemorySplit


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes over one step.

    Args:
        points: Moments in the order of time, at least one.
    """

    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        """The first moment with the most live bytes."""
        return max(self.points, key=lambda point: point.split.total)

    @property
    def highest(self) -> MemorySplit:
        """The largest bytes of each part in the step, each at its own moment."""
        return MemorySplit(*(max(getattr(point.split, part) for point in self.points) for part in PARTS))

    def within(self, phase: Phase) -> MemoryPoint | None:
        """Return the first moment of a phase with the most live bytes.

        Args:
            phase: ``forward``, ``backward`` or ``update``.

        Returns:
            The moment; None if the step has no such phase.
        """
        points = [point for point in self.points if point.phase == phase]
        return MemoryCurve(tuple(points)).peak if points else None
