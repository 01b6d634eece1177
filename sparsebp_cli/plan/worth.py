"""What choosing may gain before anything is trained: what a kept unit must be worth, and a bound on what it can be.

A step that trains a share p of its targets, examples or rows costs r of a dense one, and dense with r of the batch
costs as much. So a kept unit must be worth r / p dense ones. Units drawn uniformly are worth one each: where the batch
size is free, drawing them never pays. Units drawn by their gradients' norms g, without bias, have the second moment
(sum g)^2 / k for k = p N of N units, where dense on a share f of them has (sum g^2) / f: equal at f = p / ESS, with the
effective sample size ESS = (sum g)^2 / (N sum g^2) in (0, 1]. So choosing by norm can pay only where ESS < p / r; with
r = (1 + 2p) / 3 (the forward is whole) it gains at most 3 / (1 + 2 ESS), were norms exact and free.

Pure arithmetic and words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["targets", "examples", "rows", "entries"]
WHERE = {"targets": "at the head", "examples": "at the head", "rows": "at the sites, median"}
HOW_SURE = "an upper bound with exact and free norms, not a promise"


def effective_share(total: float, squares: float, number: int) -> float | None:
    """Return the effective sample size of norms, over their number.

    Args:
        total: Sum of the norms.
        squares: Sum of their squares.
        number: How many there are.

    Returns:
        In (0, 1]: 1 where all are equal, 1 / number where one holds everything; None where all are zero.
    """
    return min(1.0, total * total / (number * squares)) if number and squares > 0.0 else None


def most_gain(effective: float) -> float:
    """Return the largest factor by which choosing units by norm may beat dense at the same cost, at the best share.

    Args:
        effective: Effective sample size over the number of units, in (0, 1].

    Returns:
        From 1 to 3.
    """
    return 3.0 / (1.0 + 2.0 * effective)


@dataclass(frozen=True)
class Worth:
    """What one step of a policy costs and trains, and how unequal the gradients are that it chooses among.

    Args:
        cost_ratio: r: FLOPs of forward and backward over those of dense, as counted.
        seconds_ratio: The same in time, taken in turn.
        share: p: of the units that the policy chooses among, those that are trained; None where it chooses none.
        unit: What it chooses among; entries have no effective sample size here.
        effective: By unit, the effective sample size of all gradients' norms over their number.
    """

    cost_ratio: float
    seconds_ratio: float
    share: float | None
    unit: Unit | None
    effective: dict[Unit, float]

    @property
    def unit_worth(self) -> float | None:
        """r / p: how many dense units a kept one must be worth; None where nothing is chosen."""
        return self.cost_ratio / self.share if self.share else None

    @property
    def can_pay(self) -> bool | None:
        """Whether choosing by norm could pay at this share: ESS < p / r; None where it is not known."""
        effective = None if self.unit is None else self.effective.get(self.unit)
        if effective is None or not self.share or self.share >= 1.0:
            return None
        return effective < self.share / self.cost_ratio

    def lines(self) -> list[str]:
        """Return it in words, one or two lines."""
        return [line for line in (self._cost(), self._choice()) if line]

    def _cost(self) -> str:
        if self.share is None and abs(self.cost_ratio - 1.0) < 0.005:
            return ""
        text = (
            f"cost: a step executes {self.cost_ratio:.0%} of a dense step's FLOPs, forward and backward, in "
            f"{self.seconds_ratio:.0%} of its time (taken in turn, at the first step)"
        )
        if self.share is None or self.unit is None or self.share >= 1.0:
            return text
        return (
            f"{text}; it keeps {self.share:.0%} of the {self.unit}: each must be worth {self.unit_worth:.2f} dense "
            f"ones, since dense with {self.cost_ratio:.0%} of the batch costs the same"
        )

    def _choice(self) -> str:
        if self.unit is None or self.can_pay is None:
            bounds = [f"{unit} {most_gain(value):.2f}x ({value:.2f})" for unit, value in self.effective.items()]
            known = self.unit is None or self.unit in self.effective
            if not bounds or not known:
                return ""
            return (
                f"choosing by norm could gain at most, over dense at the same cost, among {', '.join(bounds)}; in "
                f"brackets the gradients' effective sample size over their number; {HOW_SURE}"
            )
        effective, highest = self.effective[self.unit], self.share / self.cost_ratio if self.share else 0.0
        verdict = "it can pay at this share" if self.can_pay else "it cannot pay at this share"
        return (
            f"choosing: the gradients' effective sample size is {effective:.2f} of the {self.unit} "
            f"({WHERE[self.unit]}); choice by norm gains at most {most_gain(effective):.2f}x over dense at the same "
            f"cost, and only where that size is below p / r = {highest:.2f}: {verdict} ({HOW_SURE})"
        )
