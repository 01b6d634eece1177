"""Bounds on the gain of selection, before training: the speed-up limit, what a kept unit must be worth, and at most is.

A step that trains a share p of its targets, examples or rows costs a share r of a dense step; dense on a share r of the
batch costs the same. So a kept unit must be worth r / p dense ones. Units drawn uniformly are worth one each: if the
batch size is free, drawing them never pays. Units drawn without bias by their gradients' norms g have the second moment
(sum g)^2 / k for k = p N of N units, where dense on a share f of them has (sum g^2) / f. The two are equal at
f = p / ESS, with the effective sample size ESS = (sum g)^2 / (N sum g^2) in (0, 1]. So selection by norm can pay only
if ESS < p / r. With r = (1 + 2p) / 3 (the forward is complete) it gains at most 3 / (1 + 2 ESS), and that only if norms
were exact and free.

This module holds the arithmetic and the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["targets", "examples", "rows", "entries"]
WHERE = {"targets": "at the head", "examples": "at the head", "rows": "at the sites, median"}
HOW_SURE = "an upper bound, as if the sizes were known and free"


def effective_share(total: float, squares: float, number: int) -> float | None:
    """Return the effective sample size of norms over their number, from their sum and the sum of their squares. It is 1
    if all are equal, 1 / number if all but one are zero, None if all are zero."""
    return min(1.0, total * total / (number * squares)) if number and squares > 0.0 else None


def max_gain(effective: float) -> float:
    """Return the largest factor, in [1, 3], by which selection by norm may beat dense at the same cost and the best
    share. ``effective`` is the effective sample size over the number of units, in (0, 1]."""
    return 3.0 / (1.0 + 2.0 * effective)


@dataclass(frozen=True)
class SelectionGain:
    """Cost and trained share of a policy's step, and effective sample sizes of the gradients that it selects from."""

    cost_ratio: float  # r: counted FLOPs of forward and backward over those of dense
    seconds_ratio: float  # the same in time, measured in turn
    share: float | None  # p: trained share of the units; None if the policy selects none
    unit: Unit | None  # what it selects; no effective sample size is known of entries
    effective: dict[Unit, float]  # by unit, effective sample size of the gradients' norms over their number

    @property
    def unit_worth(self) -> float | None:
        """r / p: how many dense units a kept one must be worth; None if nothing is selected."""
        return self.cost_ratio / self.share if self.share else None

    @property
    def can_pay(self) -> bool | None:
        """Whether selection by norm could pay at this share: ESS < p / r; None if unknown."""
        effective = None if self.unit is None else self.effective.get(self.unit)
        if effective is None or not self.share or self.share >= 1.0:
            return None
        return effective < self.share / self.cost_ratio

    def lines(self) -> list[str]:
        """Describe the gain in at most two lines."""
        return [line for line in (self.describe_cost(), self.describe_choice()) if line]

    def describe_cost(self) -> str:
        """Describe the cost of a step; empty where it is dense's."""
        if self.share is None and abs(self.cost_ratio - 1.0) < 0.005:
            return ""
        text = (
            f"the first step costs {self.cost_ratio:.2f} dense steps in FLOPs of forward and backward, "
            f"{self.seconds_ratio:.2f} in time (taken in turn)"
        )
        if self.share is None or self.unit is None or self.share >= 1.0:
            return text
        return (
            f"{text}; it keeps {self.share:.0%} of the {self.unit}. Whether that can beat a smaller batch: `sparsebp "
            "worth RECIPE`"
        )

    def describe_choice(self) -> str:
        """Describe what picking by the size of gradients could bring; empty where nothing is known."""
        if self.unit is None or self.can_pay is None:
            known = self.unit is None or self.unit in self.effective
            if not self.effective or not known:
                return ""
            bounds = [f"{unit} {max_gain(value):.2f} times ({value:.2f})" for unit, value in self.effective.items()]
            return (
                "what picking by gradient size could bring, against dense training of the same cost: at most "
                f"{', '.join(bounds)}. In brackets: how equal the gradients are; at 1 all have one size and there is "
                f"nothing to pick. This is {HOW_SURE}"
            )
        effective, highest = self.effective[self.unit], self.share / self.cost_ratio if self.share else 0.0
        answer = "it can pay" if self.can_pay else "it cannot pay"
        return (
            f"what picking {self.unit} by gradient size could bring: at most {max_gain(effective):.2f} times dense "
            f"training of the same cost. The gradients {WHERE[self.unit]} are {effective:.2f} equal (at 1 all have one "
            f"size); at this share that has to be below {highest:.2f}, so {answer}. This is {HOW_SURE}"
        )


def speedup_limit(
    forward_flops: float,
    backward_flops: float,
    claimed_backward_flops: float,
    claimed_forward_flops: float | None = None,
) -> float:
    """Return the largest speed-up of forward plus backward if time were proportional to FLOPs, at least 1 unless the
    policy claims more than dense. With F for the forward, 2F for the backward and a claimed share p of all of it, this
    is 3 / (1 + 2p). The claimed forward includes the FLOPs of the selection itself; None: the dense forward."""
    forward = forward_flops if claimed_forward_flops is None else claimed_forward_flops
    if min(forward_flops, backward_flops, claimed_backward_flops, forward) < 0 or forward + claimed_backward_flops == 0:
        raise ValueError("FLOP counts must be positive")
    return (forward_flops + backward_flops) / (forward + claimed_backward_flops)


def reached_share(dense_seconds: float, policy_seconds: float, limit: float) -> float | None:
    """Return the reached share of the theoretical saving in time: 1.0 for all of it, 0.0 for none, negative if the
    policy is slower. None if the policy claims no saving (a limit below 1.001)."""
    if limit < 1.001:
        return None
    return (1.0 - policy_seconds / dense_seconds) / (1.0 - 1.0 / limit)
