"""Bound the gain of selection before training: the speed-up limit, the value that a kept unit needs, and its maximum.

A step that trains a fraction p of its targets, examples or token positions costs a fraction r of a dense step. A dense
step on a fraction r of the batch costs the same. So a kept unit must be worth r / p dense units.
Units drawn uniformly are worth one dense unit each: if the batch size is free, drawing them never pays. Now draw units
without bias, by their gradients' norms g, and keep k = p N of N units. The second moment is (sum g)^2 / k. Dense on a
fraction f of the units has (sum g^2) / f.
The two are equal at f = p / ESS, with the effective sample size ESS = (sum g)^2 / (N sum g^2) in (0, 1]. So selection
by norm can pay only if ESS < p / r. With r = (1 + 2p) / 3 (the forward is complete), it gains at most 3 / (1 + 2 ESS),
and only if norms were exact and free.

This module holds the arithmetic and the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["targets", "examples", "rows", "entries"]
WHERE = {"targets": "at the head", "examples": "at the head", "rows": "at the sites, median"}
HOW_SURE = "an upper bound: it assumes that the sizes are known at no cost"


def effective_share(total: float, squares: float, number: int) -> float | None:
    """Return the effective sample size of norms over their number, from their sum and their sum of squares. It is 1 if
    all norms are equal, 1 / number if all but one are zero, None if all are zero."""
    return min(1.0, total * total / (number * squares)) if number and squares > 0.0 else None


def max_gain(effective: float) -> float:
    """Return the largest factor, in [1, 3], by which selection by norm may beat dense at equal cost and the best
    fraction kept. ``effective`` is the effective sample size over the number of units, in (0, 1]."""
    return 3.0 / (1.0 + 2.0 * effective)


@dataclass(frozen=True)
class SelectionGain:
    """The cost of a policy's step, the fraction it trains, and the effective sample sizes of its gradients."""

    cost_ratio: float  # r: counted FLOPs of forward and backward over those of a dense step
    seconds_ratio: float  # the same ratio in time; policy and dense were timed alternately
    share: float | None  # p: fraction of the units that is trained; None if the policy selects no units
    unit: Unit | None  # what the policy selects; for entries no effective sample size is known
    effective: dict[Unit, float]  # by unit: effective sample size of the gradients' norms over their number

    @property
    def unit_worth(self) -> float | None:
        """r / p: how many dense units a kept unit must be worth; None if nothing is selected."""
        return self.cost_ratio / self.share if self.share else None

    @property
    def can_pay(self) -> bool | None:
        """Whether selection by norm could pay at this fraction: ESS < p / r; None if unknown."""
        effective = None if self.unit is None else self.effective.get(self.unit)
        if effective is None or not self.share or self.share >= 1.0:
            return None
        return effective < self.share / self.cost_ratio

    def lines(self) -> list[str]:
        """Describe the gain in at most two lines."""
        return [line for line in (self.describe_cost(), self.describe_choice()) if line]

    def describe_cost(self) -> str:
        """Describe the cost of a step; empty if it equals the cost of a dense step."""
        if self.share is None and abs(self.cost_ratio - 1.0) < 0.005:
            return ""
        text = (
            f"forward and backward of the first step take {self.cost_ratio:.2f} of the FLOPs of a dense step, and "
            f"{self.seconds_ratio:.2f} of its time (measured alternately)"
        )
        if self.share is None or self.unit is None or self.share >= 1.0:
            return text
        return (
            f"{text}; it keeps {self.share:.0%} of the {self.unit}. `sparsebp worth RECIPE` estimates whether it can "
            "beat a smaller batch"
        )

    def describe_choice(self) -> str:
        """Describe the largest possible gain from choosing by gradient size; empty if unknown."""
        if self.unit is None or self.can_pay is None:
            known = self.unit is None or self.unit in self.effective
            if not self.effective or not known:
                return ""
            bounds = [f"{unit} {max_gain(value):.2f} times ({value:.2f})" for unit, value in self.effective.items()]
            return (
                "choosing by gradient size could replace at most this many times its cost in dense training: "
                f"{', '.join(bounds)}. In brackets: how equal the gradients are (1: all have the same size). This is "
                f"{HOW_SURE}"
            )
        effective, highest = self.effective[self.unit], self.share / self.cost_ratio if self.share else 0.0
        answer = "it can pay" if self.can_pay else "it cannot pay"
        return (
            f"choosing {self.unit} by gradient size could replace at most {max_gain(effective):.2f} times its cost in "
            f"dense training. How equal the gradients {WHERE[self.unit]} are: {effective:.2f} (1: all have the same "
            f"size). It can pay only below {highest:.2f}, so {answer}. This is {HOW_SURE}"
        )


def speedup_limit(
    forward_flops: float,
    backward_flops: float,
    claimed_backward_flops: float,
    claimed_forward_flops: float | None = None,
) -> float:
    """Return the largest speed-up of forward plus backward, as if time were proportional to FLOPs. It is at least 1
    unless the policy claims more than dense. With F for the forward, 2F for the backward and a claimed fraction p of
    the backward, it is 3 / (1 + 2p). The claimed forward includes the FLOPs of the selection itself; None means the
    dense forward. Raise ValueError for negative counts, or if the policy claims none."""
    forward = forward_flops if claimed_forward_flops is None else claimed_forward_flops
    if min(forward_flops, backward_flops, claimed_backward_flops, forward) < 0 or forward + claimed_backward_flops == 0:
        raise ValueError("FLOP counts must be positive")
    return (forward_flops + backward_flops) / (forward + claimed_backward_flops)


def reached_share(dense_seconds: float, policy_seconds: float, limit: float) -> float | None:
    """Return the fraction of the theoretical time saving that was reached: 1.0 for all of it, 0.0 for none, negative if
    the policy is slower. None if the policy claims no saving (a limit below 1.001)."""
    if limit < 1.001:
        return None
    return (1.0 - policy_seconds / dense_seconds) / (1.0 - 1.0 / limit)
