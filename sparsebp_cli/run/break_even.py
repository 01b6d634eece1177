"""The break-even of a form: the share kept below which multiplying only what was selected takes less time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["at", "always", "never", "unclear"]
Points = Sequence[tuple[float, float]]  # share kept, and time over that of the other computation


def find_crossing(points: Points) -> tuple[Kind, float]:
    """Return the share below which a form is faster, among the shares measured: 1.0 if it always is, 0.0 if it never
    is. It lies on a straight line in time between two shares. Where a form is faster at a larger share than one at
    which it is slower, the smaller one counts, and the kind is ``unclear``. No share may occur twice."""
    if not points:
        raise ValueError("there is nothing to interpolate")
    ordered = sorted(points)
    num_faster = next((number for number, (_, ratio) in enumerate(ordered) if ratio >= 1.0), len(ordered))
    if num_faster == len(ordered):
        return "always", 1.0
    kind: Kind = "at" if num_faster else "never"
    if any(ratio < 1.0 for _, ratio in ordered[num_faster:]):
        kind = "unclear"
    if not num_faster:
        return kind, 0.0
    (low, below), (high, above) = ordered[num_faster - 1], ordered[num_faster]
    return kind, low + (high - low) * (1.0 - below) / (above - below)
