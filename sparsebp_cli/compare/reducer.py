"""Reduces a run's evaluations to one number."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.errors import UsageError


@dataclass(frozen=True)
class Reducer:
    """How a run's evaluations become one number.

    Args:
        kind: ``final`` (after the last step), ``best`` (of all evaluations; favours runs that were evaluated more
            often), or ``mean`` (of the last evaluations).
        last: Of ``mean``: how many evaluations, at least 2.
    """

    kind: str = "final"
    last: int = 1

    @classmethod
    def parse(cls, text: str) -> Reducer:
        """Parse ``final``, ``best`` or ``mean:K``; raises ``UsageError`` for anything else."""
        if text in {"final", "best"}:
            return cls(text)
        if (match := re.fullmatch(r"mean:([1-9][0-9]{0,3})", text)) and int(match[1]) > 1:
            return cls("mean", int(match[1]))
        raise UsageError(f"--reduce must be final, best, or mean:K with K from 2 (mean:5), got {text!r}")

    @property
    def name(self) -> str:
        """The reducer in words."""
        return f"mean of last {self.last} evaluations" if self.kind == "mean" else self.kind

    def reduce(self, values: Sequence[float], *, higher_is_better: bool) -> float | None:
        """Return the number; None when there are too few evaluations, not finite when the last one is not.

        ``values`` are in the order of steps, the last one after the last step. ``higher_is_better`` is for ``best``.
        """
        if not values or len(values) < self.last:
            return None
        if not math.isfinite(values[-1]):
            return values[-1]  # a run that diverged in the end has diverged, whatever its earlier values
        if self.kind == "best":
            finite = [value for value in values if math.isfinite(value)]
            return max(finite) if higher_is_better else min(finite)
        return statistics.fmean(values[-self.last :])
