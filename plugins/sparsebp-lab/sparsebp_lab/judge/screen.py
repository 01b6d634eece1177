"""Screen candidates: a few runs against the baseline's existing runs, which drops most of them.

The screen only decides who goes on; fresh pairs decide what is kept. So its errors cannot cause a false keep, and one
run of the baseline serves all candidates. It is A. Wald's sequential probability ratio test (1945) of the gain to find
against none. The ledger estimates the spread of pairs from all earlier pairs with this baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Chosen by benchmarks/judge.py.
FIRST_RUNS = 4  # of the baseline, before its first question, to estimate a run's standard deviation
MOST_RUNS = 8  # of a candidate in its screen
DROP = math.log(0.2)
PASS = math.log(10.0)
PRIOR_PAIRS = 3.0  # weight, in pairs, of the assumption that the runs of a pair are independent
NARROWEST, WIDEST = 0.5, 2.5  # limits of the effect in standard deviations of a pair

Passage = Literal["open", "pass", "drop"]


@dataclass(frozen=True)
class ScreenSquares:
    """The spread of pairs: the sum of squares around each question's mean, and the degrees of freedom."""

    total: float = 0.0
    freedom: int = 0

    def add(self, gains: Sequence[float]) -> ScreenSquares:
        """Return the squares with those of one question's pairs added; a single pair adds nothing."""
        if len(gains) < 2:
            return self
        mean = math.fsum(gains) / len(gains)
        total = self.total + math.fsum((gain - mean) ** 2 for gain in gains)
        return ScreenSquares(total, self.freedom + len(gains) - 1)

    def find_spread(self, run_spread: float) -> float:
        """Return the standard deviation of a pair; with few known pairs it follows that of a run."""
        before = 2.0 * PRIOR_PAIRS * run_spread**2
        return math.sqrt((before + self.total) / (PRIOR_PAIRS + self.freedom))


def log_odds(total: float, count: int, effect: float, pair_spread: float) -> float:
    """Return the logarithm of the likelihood ratio of pairs: a gain of ``effect`` against none, both in the metric's
    unit. ``total`` is the sum of the pairs. numpy arrays give arrays."""
    return effect * (total - count * effect / 2.0) / pair_spread**2


def find_passage(odds: float, count: int) -> Passage:
    """Return whether a candidate passes, fails or continues after ``count`` runs of at most :data:`MOST_RUNS`."""
    if odds <= DROP:
        return "drop"
    if odds >= PASS:
        return "pass"
    if count < MOST_RUNS:
        return "open"
    return "pass" if odds > 0.0 else "drop"


def find_design(effect: float, pair_spread: float) -> float:
    """Return the effect in standard deviations of a pair, for which the deciding pairs are tested."""
    return min(max(effect / pair_spread if pair_spread else WIDEST, NARROWEST), WIDEST)
