"""Split live bytes over one training step into five parts, as the event log stores and pictures show them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal, get_args

from sparsebp_cli.run.record_type import CurveValues

Part = Literal["weights", "gradients", "optimizer", "activations", "workspace"]
Phase = Literal["forward", "backward", "update"]
PARTS: tuple[Part, ...] = get_args(Part)
PHASES: tuple[Phase, ...] = get_args(Phase)
MOST_POINTS = 300  # of a stored curve; a picture cannot resolve more


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

    def thin(self, most: int = MOST_POINTS) -> MemoryCurve:
        """Return a curve of fewer points with the same peak, first and last point.

        Args:
            most: Largest number of points, at least 4. Each group of neighbours keeps its highest and its lowest point.

        Returns:
            The new curve, or this one if it is small enough.
        """
        if len(self.points) <= most:
            return self
        inner, stretches = range(1, len(self.points) - 1), (most - 2) // 2
        kept = {0, len(self.points) - 1}
        for number in range(stretches):
            stretch = inner[len(inner) * number // stretches : len(inner) * (number + 1) // stretches]
            kept |= {max(stretch, key=self._total), min(stretch, key=self._total)}
        return MemoryCurve(tuple(self.points[index] for index in sorted(kept)))

    def to_values(self) -> CurveValues:
        """Return the thinned curve in the stored form: phases by number, times in whole microseconds."""
        points = [
            [round(point.seconds * 1e6), PHASES.index(point.phase), *astuple(point.split)]
            for point in self.thin().points
        ]
        return {"columns": ["microseconds", "phase", *PARTS], "points": points, "highest": list(astuple(self.highest))}

    @classmethod
    def from_values(cls, values: CurveValues) -> MemoryCurve:
        """Return the curve that :meth:`to_values` converted.

        Args:
            values: Stored values from :meth:`to_values`.

        Returns:
            The curve.
        """
        return cls(
            tuple(
                MemoryPoint(micros / 1e6, PHASES[phase], MemorySplit(*parts))
                for micros, phase, *parts in values["points"]
            )
        )

    def _total(self, index: int) -> int:
        return self.points[index].split.total
