"""The exchange rate between a method and the size of dense's batch, known before training.

Let a batch of B examples have a gradient with covariance C / B around its mean, and let a method return that gradient
plus an error e whose mean over the method's own draws is zero, with E|e|^2 = nu tr(C) / B. Its variance is then
tr(C) / (B / (1 + nu)): in its first two moments it is the gradient of a batch of B / (1 + nu) examples. Where training
is described by these moments (small steps, many of them), the method trains like dense with that batch, in as many
steps at the same rate. It is worth its price only if it costs less than dense with that batch; with a step of r dense
ones, and where cost is in proportion to the batch, only if (1 + nu) r < 1. Examples drawn uniformly with a share p
have nu = 1 / p - 1 and r = p: exactly 1, as they must.

What it assumes, and so where it fails: an error whose mean is not zero does not average out over steps (*bias*, a
number of its own; the law bounds such a method from one side at most); the trace weighs all directions alike (so the
error is measured in the metric of the optimizer: AdamW divides each entry by the root of its second moment; and once
more with the loss's curvature between, since where the loss is flat an error costs nothing in its step: decision 108);
early in training gradients are signal more than noise; clipping and Adam bound what heavy tails the trace counts.

This module holds the arithmetic and the verdict. It is a null hypothesis for a method, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["dense", "cannot beat a smaller batch", "could", "decide by training"]
LEVEL = 0.95
NEGLIGIBLE_BIAS = 0.05  # of the variance between batches: below it bias is lost in the noise that every step has


@dataclass(frozen=True)
class Interval:
    """An estimate with a 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        """Return a value without an error."""
        return cls(value, value, value)

    @classmethod
    def of_ratio(cls, pairs: Sequence[tuple[float, float]]) -> Interval:
        """Return the ratio of the sums of pairs, which are independent of each other."""
        total = sum(below for _, below in pairs)
        ratio = sum(above for above, _ in pairs) / total
        if len(pairs) < 2:
            return cls.exactly(ratio)
        spread = stdev(above - ratio * below for above, below in pairs) * math.sqrt(len(pairs)) / total
        half = quantile(len(pairs) - 1) * spread
        return cls(ratio, ratio - half, ratio + half)


@dataclass(frozen=True)
class BatchPair:
    """Squares of two batches of the same size at the same weights, in one metric."""

    between: float  # variance of the dense gradient over batches: |g1 - g2|^2 / 2
    noise: float  # variance of the policy's draws on the first batch
    bias: float  # squared mean error of the policy's draws there; an estimate, which may be < 0
    # Squares of dense's gradients, of the first batch and the mean of both: errors grow with the gradient they are of.
    first: float = 1.0
    mean: float = 1.0


@dataclass(frozen=True)
class StepCost:
    """FLOPs of an optimizer step: of its passes, which go with the batch, and of what does not."""

    passes: float
    fixed: float  # update and trial passes

    @property
    def total(self) -> float:
        """All of it."""
        return self.passes + self.fixed


def estimate_share(points: Sequence[Sequence[BatchPair]], of: Callable[[BatchPair], float]) -> Interval:
    """Return a square over the variance between batches, mean over the points of a training, each with at least two
    pairs. A policy is measured on the first batches alone, so the sum of its squares there is a ratio estimate of that
    over all: it is multiplied by what the gradients of all batches are over those of the first ones. The error is that
    of a jackknife over the pairs of each point."""
    values, variance, freedom = list[float](), 0.0, 0
    for pairs in points:
        values.append(_estimate(pairs, of))
        left = [_estimate([*pairs[:place], *pairs[place + 1 :]], of) for place in range(len(pairs))]
        mean, number = fmean(left), len(pairs)
        variance += (number - 1) / number * sum((one - mean) ** 2 for one in left)
        freedom += number - 1
    mean = fmean(values)
    half = quantile(freedom) * math.sqrt(variance) / len(values)
    return Interval(mean, mean - half, mean + half)


def _estimate(pairs: Sequence[BatchPair], of: Callable[[BatchPair], float]) -> float:
    share = sum(map(of, pairs)) / sum(pair.between for pair in pairs)
    first = sum(pair.first for pair in pairs)  # 0: without a gradient there is no error either
    return share * sum(pair.mean for pair in pairs) / first if first else share


def price_against_batch(noise: float, policy: StepCost, dense: StepCost) -> float:
    """Return what the policy's step costs over dense's with the batch that has as much noise; (1 + nu) r where an
    update costs nothing. Below 1 the policy could be worth its price."""
    return policy.total / (dense.passes / (1.0 + noise) + dense.fixed)


def combine(noise: Interval, ratio: Interval, policy: StepCost, dense: StepCost) -> Interval:
    """Return :func:`price_against_batch` with the errors of the noise and of the price (``ratio``: the policy's step
    over dense's), which are independent, joined on a logarithmic scale."""
    value = price_against_batch(max(0.0, noise.value), policy, dense)
    # The low end of a price may be below 0, which has no logarithm.
    parts = [
        (
            math.log(value / price_against_batch(max(0.0, noise_end), policy, dense)),
            math.log(ratio.value / max(price_end, 1e-9)),
        )
        for noise_end, price_end in ((noise.low, ratio.low), (noise.high, ratio.high))
    ]
    below, above = (math.hypot(*part) for part in parts)
    return Interval(value, value * math.exp(-below), value * math.exp(above))


def give_verdict(product: Interval, noise: Interval, bias: Interval, *, exact: bool, unbiased: bool) -> Verdict:
    """Return what the law says of a policy. ``product`` counts the noise alone, so for a biased policy it is the least
    that it could be; ``unbiased`` is the policy's own claim, believed unless the measured bias contradicts it."""
    if exact and abs(product.value - 1.0) < 0.005 and noise.value == 0.0:
        return "dense"
    if product.low > 1.0:
        return "cannot beat a smaller batch"
    has_none = exact or bias.high <= NEGLIGIBLE_BIAS or (unbiased and bias.low <= 0.0)
    return "could" if product.high < 1.0 and has_none else "decide by training"


def quantile(freedom: int) -> float:
    """Return that of Student's t for a 95 % interval."""
    from scipy import special  # scipy.stats takes a second to import

    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2))
