"""InfoBatch in the obvious form: no tensors, a fixed number left out, and n / k as the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def obvious(losses: Sequence[float], keep: float, drawn: Callable[[list[int]], list[int]]) -> list[float]:
    """Return the weight of each example, 0 for those that are left out.

    Args:
        losses: Loss of each example when it was last trained on; NaN before that.
        keep: Share of the well-learnt ones that is visited.
        drawn: Puts these in the order in which they are left out.
    """
    seen = [loss for loss in losses if not math.isnan(loss)]
    if not seen:
        return [1.0] * len(losses)
    mean = sum(seen) / len(seen)
    well = [row for row, loss in enumerate(losses) if loss < mean]
    if not well:
        return [1.0] * len(losses)
    num_kept = max(1, round(keep * len(well)))
    out = drawn(well)[: len(well) - num_kept]
    heavy = len(well) / num_kept
    return [0.0 if row in out else heavy if row in well else 1.0 for row in range(len(losses))]
