"""The budget of a question: FLOPs of its runs, or the time that they take."""

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
    """What the runs of a question may spend in all, whichever command started them."""

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
        """Whether so many runs more fit, each as dear as the dearest up to here. The first ones always do: what a run
        takes is not known before one was made."""
        return spent[self.unit] + num_runs * dearest[self.unit] <= self.amount * (1.0 + 1e-9)

    def describe(self) -> str:
        """Return the budget in words, in the unit in which it was declared."""
        return f"{self.amount:.4g} FLOPs" if self.unit == "flops" else f"{self.amount:.4g} s"
