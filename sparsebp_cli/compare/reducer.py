"""From the values of one run's evaluations to the one number that stands for the run."""

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
        kind: ``final`` (after the last step), ``best`` (of all evaluations; flatters whoever was evaluated more often),
            or ``mean`` (of the last evaluations).
        last: Of ``mean``: how many evaluations, at least 2.
    """

    kind: str = "final"
    last: int = 1

    @classmethod
    def parse(cls, text: str) -> Reducer:
        """Read ``final``, ``best`` or ``mean:K``.

        Args:
            text: What the user wrote.

        Returns:
            The reducer.

        Raises:
            UsageError: It is none of these.
        """
        if text in {"final", "best"}:
            return cls(text)
        if (match := re.fullmatch(r"mean:([1-9][0-9]{0,3})", text)) and int(match[1]) > 1:
            return cls("mean", int(match[1]))
        raise UsageError(f"--reduce must be final, best, or mean:K with K from 2 (mean:5), got {text!r}")

    @property
    def name(self) -> str:
        """In words."""
        return f"mean of last {self.last} evaluations" if self.kind == "mean" else self.kind

    def reduce(self, values: Sequence[float], *, higher_is_better: bool) -> float | None:
        """Return the number.

        Args:
            values: One an evaluation, in the order of steps; the last is the one after the last step.
            higher_is_better: Which way ``best`` looks.

        Returns:
            It; None when there are too few evaluations, not finite when the last one is not.
        """
        if not values or len(values) < self.last:
            return None
        if not math.isfinite(values[-1]):
            return values[-1]  # a run that broke down is not saved by what it was before
        if self.kind == "best":
            finite = [value for value in values if math.isfinite(value)]
            return max(finite) if higher_is_better else min(finite)
        return statistics.fmean(values[-self.last :])
