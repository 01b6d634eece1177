"""The share below which a form is faster than dense or than another form. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class BreakEven(BaseModel):
    """The share kept below which a form is faster than another computation.

    Args:
        site: Of the form.
        label: Of the form.
        against: Label of the slower computation: plain PyTorch, or another form at that site.
        kind: ``at`` a share; ``always`` or ``never`` faster, among the shares measured; ``unclear``: faster at a larger
            share than one at which it is slower, because of noise or overhead.
        keep: The share, where the kind is ``at``; between two that were measured.
        smallest: Smallest share measured.
        largest: Largest share measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str
    label: str
    against: str
    kind: Literal["at", "always", "never", "unclear"]
    keep: float | None = Field(None, gt=0.0, le=1.0)
    smallest: float
    largest: float

    @property
    def words(self) -> str:
        """The break-even as a short text."""
        if self.kind == "at":
            return f"below {self.keep:.3g}"
        if self.kind == "unclear":
            return "unclear: faster and slower in turn"
        measured = f"{self.smallest:g}" if self.smallest == self.largest else f"{self.smallest:g} to {self.largest:g}"
        return f"{self.kind} (of {measured})"


def find_break_even(site: str, label: str, against: str, points: Sequence[tuple[float, float]]) -> BreakEven:
    """Find the share at which a form takes as long as another, by linear interpolation between the two nearest points.

    ``points`` are pairs of share kept and time ratio, at least one, in any order, no share twice. Time is interpolated
    rather than speed-up: as long as it goes with FLOPs, time is linear in the share kept.
    """
    if not points:
        raise ValueError("there is nothing to interpolate")
    ordered = sorted(points)
    is_faster = [ratio < 1.0 for _, ratio in ordered]
    num_faster = sum(is_faster)
    kind: Literal["at", "always", "never", "unclear"] = "at"
    keep = None
    if num_faster in (0, len(ordered)):
        kind = "always" if num_faster else "never"
    elif not all(is_faster[:num_faster]):
        kind = "unclear"
    else:
        (low, below), (high, above) = ordered[num_faster - 1], ordered[num_faster]
        keep = low + (high - low) * (1.0 - below) / (above - below)
    return BreakEven(
        site=site, label=label, against=against, kind=kind, keep=keep, smallest=ordered[0][0], largest=ordered[-1][0]
    )
