"""The budget of a question: FLOPs or time of its runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.errors import UsageError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FORM = re.compile(r"([0-9.]+(?:e\+?[0-9]+)?) *([smhd]?|FLOPs?)", re.IGNORECASE)


@dataclass(frozen=True)
class QuestionBudget:
    """Limit on what all runs of a question may spend, over all commands."""

    amount: float
    unit: Literal["flops", "seconds"]

    @classmethod
    def parse(cls, text: str) -> QuestionBudget:
        """Read ``30m``, ``2h``, ``90s``, ``1d``, or a number of FLOPs such as ``3e15``. Raises UsageError."""
        found = FORM.fullmatch(text.strip())
        try:
            number = float(found[1]) if found else math.nan
        except ValueError:
            number = math.nan
        if found is None or not (math.isfinite(number) and number > 0.0):
            raise UsageError(f"--budget must be a time (90s, 30m, 2h, 1d) or a number of FLOPs (3e15), got {text!r}")
        word = found[2].lower()
        return cls(number * UNITS[word], "seconds") if word in UNITS else cls(number, "flops")

    def allows(self, spent: Mapping[str, float], dearest: Mapping[str, float], num_runs: int) -> bool:
        """Return whether ``num_runs`` more runs fit, each at the largest cost so far. The first runs always fit,
        because the cost of a run is unknown before one has finished."""
        return spent[self.unit] + num_runs * dearest[self.unit] <= self.amount * (1.0 + 1e-9)

    def describe(self) -> str:
        """Return the budget in words, in its own unit."""
        return f"{self.amount:.4g} FLOPs" if self.unit == "flops" else f"{self.amount:.4g} s"
