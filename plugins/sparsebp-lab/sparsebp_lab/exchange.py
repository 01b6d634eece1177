"""Compare a method with dense training on a smaller batch, before training.

Let the gradient of a batch of B examples have the covariance C / B around its mean. A method returns that gradient plus
an error e whose mean over the method's own draws is zero, with E|e|^2 = nu tr(C) / B. The variance is then tr(C) / (B /
(1 + nu)): in its first two moments the result is the gradient of a batch of B / (1 + nu) examples. If these moments
describe the training (many small steps), the method trains like dense with that batch, in as many steps at the same
rate. The method gains only if it costs less than dense with that batch. With a step cost of r dense steps, and cost in
proportion to the batch, this means (1 + nu) r < 1. Examples drawn uniformly with probability p have nu = 1 / p - 1 and
r = p, so exactly 1, as expected.

The estimate fails where its assumptions fail. An error with a nonzero mean does not average out over steps; its *bias*
is a separate number, and the estimate is then only a lower bound. The trace weights all directions equally. So the
error is measured in the optimizer's metric (AdamW divides each entry by the root of its second moment), and once more
weighted by the loss's curvature, since an error in a flat direction costs nothing in its step: decision 108. Early in
training gradients are more signal than noise. Clipping and Adam limit heavy tails, which the trace counts.

This module holds the arithmetic and the verdict: a null hypothesis for a method, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["dense", "cannot beat a smaller batch", "could", "decide by training"]
LEVEL = 0.95
NEGLIGIBLE_BIAS = 0.05  # relative to the variance between batches: a smaller bias disappears in the noise of every step


@dataclass(frozen=True)
class RateInterval:
    """An estimate with a 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> RateInterval:
        """Return an interval without an error."""
        return cls(value, value, value)

    @classmethod
    def of_ratio(cls, pairs: Sequence[tuple[float, float]]) -> RateInterval:
        """Return the ratio of the sums of independent pairs."""
        total = sum(below for _, below in pairs)
        ratio = sum(above for above, _ in pairs) / total
        if len(pairs) < 2:
            return cls.exactly(ratio)
        spread = stdev(above - ratio * below for above, below in pairs) * math.sqrt(len(pairs)) / total
        half = quantile(len(pairs) - 1) * spread
        return cls(ratio, ratio - half, ratio + half)


@dataclass(frozen=True)
class BatchPair:
    """Squared differences for two batches of the same size at the same weights, in one metric."""

    between: float  # variance of the dense gradient over batches: |g1 - g2|^2 / 2
    noise: float  # variance of the policy's draws on the first batch
    bias: float  # squared mean error of the policy's draws on the first batch; an estimate, which may be negative
    # Squares of the dense gradients, of the first batch and the mean of both: errors grow with their gradient.
    first: float = 1.0
    mean: float = 1.0


@dataclass(frozen=True)
class DenseStepCost:
    """FLOPs of an optimizer step: the passes, which scale with the batch, and the fixed part."""

    passes: float
    fixed: float  # update and trial passes

    @property
    def total(self) -> float:
        return self.passes + self.fixed


def estimate_share(points: Sequence[Sequence[BatchPair]], of: Callable[[BatchPair], float]) -> RateInterval:
    """Return a square over the variance between batches, as the mean over the points of a training, each with at least
    two pairs. Policies are measured on the first batches only. The sum of their squares there is scaled by the
    gradients of all batches over those of the first ones, as a ratio estimate. The error comes from a jackknife over
    the pairs of each point."""
    values, variance, freedom = list[float](), 0.0, 0
    for pairs in points:
        values.append(_estimate(pairs, of))
        left = [_estimate([*pairs[:place], *pairs[place + 1 :]], of) for place in range(len(pairs))]
        mean, number = fmean(left), len(pairs)
        variance += (number - 1) / number * sum((one - mean) ** 2 for one in left)
        freedom += number - 1
    mean = fmean(values)
    half = quantile(freedom) * math.sqrt(variance) / len(values)
    return RateInterval(mean, mean - half, mean + half)


def _estimate(pairs: Sequence[BatchPair], of: Callable[[BatchPair], float]) -> float:
    share = sum(map(of, pairs)) / sum(pair.between for pair in pairs)
    first = sum(pair.first for pair in pairs)  # 0: without a gradient there is no error
    return share * sum(pair.mean for pair in pairs) / first if first else share


def price_against_batch(noise: float, policy: DenseStepCost, dense: DenseStepCost) -> float:
    """Return the cost of the policy's step over that of dense with the batch of the same variance; (1 + nu) r if an
    update costs nothing. Below 1 the policy may be faster than dense."""
    return policy.total / (dense.passes / (1.0 + noise) + dense.fixed)


def combine(noise: RateInterval, ratio: RateInterval, policy: DenseStepCost, dense: DenseStepCost) -> RateInterval:
    """Return :func:`price_against_batch` with its error. It joins the independent errors of the noise and of ``ratio``,
    the policy's step cost over dense's, on a logarithmic scale."""
    value = price_against_batch(max(0.0, noise.value), policy, dense)
    # The lower end of a cost may be negative and has no logarithm.
    parts = [
        (
            math.log(value / price_against_batch(max(0.0, noise_end), policy, dense)),
            math.log(ratio.value / max(price_end, 1e-9)),
        )
        for noise_end, price_end in ((noise.low, ratio.low), (noise.high, ratio.high))
    ]
    below, above = (math.hypot(*part) for part in parts)
    return RateInterval(value, value * math.exp(-below), value * math.exp(above))


def give_verdict(
    product: RateInterval, noise: RateInterval, bias: RateInterval, *, exact: bool, unbiased: bool
) -> Verdict:
    """Return the verdict on a policy. ``product`` counts only the noise, so it is a lower bound for a biased policy.
    ``unbiased`` is the policy's own claim, accepted unless the measured bias contradicts it."""
    if exact and abs(product.value - 1.0) < 0.005 and noise.value == 0.0:
        return "dense"
    if product.low > 1.0:
        return "cannot beat a smaller batch"
    has_none = exact or bias.high <= NEGLIGIBLE_BIAS or (unbiased and bias.low <= 0.0)
    return "could" if product.high < 1.0 and has_none else "decide by training"


def quantile(freedom: int) -> float:
    """Return the quantile of Student's t for a 95 % interval."""
    from scipy import special  # scipy.stats takes a second to import

    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2))
