"""Compute the remaining length of Adam's step under a policy's noise.

Adam divides each gradient entry by the root of its second moment, which contains all noise of the gradient. Noise in
any direction, even a flat one, makes the step shorter. Let s be the square of the mean gradient, v dense's second
moment, and e the variance of the policy's own draws in a step's batch. A step goes downhill by sum(s / sqrt(v)) times
the rate without the noise, and by sum(s / sqrt(v + e)) with it. Their ratio is the fraction of the learning rate with
which the policy trains. A smaller batch has such a fraction as well, with the variance between batches for e; dense's
surface over batches includes it (docs/results/exchange/PROTOCOL.md, H7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from sparsebp_lab.worth.squares import Gradients, WorthMetric, inner, minus

# Noise of a smaller dense batch over that of the batch, at which the fraction is computed; between them it is linear in
# the logarithm of the batch size.
TIMES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class StepShare:
    """An estimate with its variance, from a jackknife over pairs of batches, which also corrects its bias."""

    value: float
    variance: float

    @classmethod
    def of_jackknife(cls, whole: float, parts: Sequence[float]) -> StepShare:
        """Return the estimate from its value over all pairs, and its values without each pair."""
        number, mean = len(parts), fmean(parts)
        variance = (number - 1) / number * sum((part - mean) ** 2 for part in parts)
        return cls(number * whole - (number - 1) * mean, variance)

    @classmethod
    def of_mean(cls, shares: Sequence[StepShare]) -> StepShare:
        """Return the mean of independent estimates."""
        variance = sum(share.variance for share in shares) / len(shares) ** 2
        return cls(fmean(share.value for share in shares), variance)


class StepLength:
    """The step at the weights of one point, from the dense gradients of pairs of small batches.

    ``size`` is a small batch's number of examples over a step's: variances scale as one over it.
    """

    def __init__(self, dense: Sequence[Gradients], metric: WorthMetric, size: float) -> None:
        self._size, self._signal, self._between = size, dict[str, Tensor](), dict[str, list[Tensor]]()
        self._moment = {name: moment for name in dense[0] if (moment := metric.moment(name)) is not None}
        number = len(dense)
        for name, moment in self._moment.items():
            gradients = [_or_zero(one[name], moment) for one in dense]
            total = torch.stack(gradients).sum(0)
            # The products of different batches have the square of the mean gradient as their mean.
            self._signal[name] = (total.square() - sum(g.square() for g in gradients)) / (number * (number - 1))
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            self._between[name] = [(one - other).square() * (size / 2) for one, other in pairs]
        # The moments come from clipped and from earlier gradients; one factor scales them to the current gradients.
        today = sum(_sum(self._signal[name] + torch.stack(self._between[name]).mean(0)) for name in self._moment)
        factor = today / sum(map(_sum, self._moment.values()))
        self._moment = {name: moment * factor for name, moment in self._moment.items()}
        self.is_known = factor > 0.0 and self._downhill({}) > 0.0

    def share_with(self, noise: Sequence[Mapping[str, Tensor]], times: float = 1.0) -> StepShare:
        """Return the remaining fraction under ``times`` times the noise of each pair of batches: squares of a draw's
        error on small batches, by parameter; a missing parameter has no noise."""
        names = self._moment.keys() & {name for of_pair in noise for name in of_pair}
        if not names:
            return StepShare(1.0, 0.0)
        by_name = {name: [_or_zero(one.get(name), self._moment[name]) for one in noise] for name in names}
        return self._jackknife(_leave_out(by_name, len(noise)), times * self._size)

    def shares_of_dense(self) -> list[StepShare]:
        """Return the remaining fraction for dense batches with :data:`TIMES` as much noise in addition."""
        means = _leave_out(self._between, len(next(iter(self._between.values()))))
        return [self._jackknife(means, times) for times in TIMES]

    def _jackknife(self, means: Sequence[Mapping[str, Tensor]], times: float) -> StepShare:
        whole = self._downhill({}) or 1.0
        shares = [self._downhill(mean, times) / whole for mean in means]
        return StepShare.of_jackknife(shares[0], shares[1:])

    def _downhill(self, noise: Mapping[str, Tensor], times: float = 1.0) -> float:
        """Return how fast a step goes downhill with ``times`` times the noise, in units of the rate."""
        total = 0.0
        for name, signal in self._signal.items():
            moment, own = self._moment[name], noise.get(name)
            total += inner(signal, (moment if own is None else moment.add(own, alpha=times)).rsqrt())
        return total


def _leave_out(each: Mapping[str, Sequence[Tensor]], pairs: int) -> list[dict[str, Tensor]]:
    """Return the mean over all pairs, and the means without each pair."""
    # Not as a difference from the total, which may become negative if one pair is far above the others.
    return [
        {
            name: torch.stack([e for number, e in enumerate(of_pairs) if number != left_out]).mean(0)
            for name, of_pairs in each.items()
        }
        for left_out in (None, *range(pairs))
    ]


def square_halves(one: Gradients, other: Gradients) -> dict[str, Tensor]:
    """Return half of the square of each entry's difference; a parameter without a gradient in both is missing."""
    return {name: d.square() / 2 for name in one if (d := minus(one[name], other[name])) is not None}


def share_of_batch(dense: Sequence[StepShare], noise: float) -> StepShare:
    """Return the remaining fraction for a dense batch with ``noise``, interpolated between :data:`TIMES`."""
    wanted, points = math.log1p(max(0.0, noise)), zip(map(math.log1p, TIMES), dense, strict=True)
    for (start, first), (end, second) in pairwise(points):
        if wanted <= end:
            there = (wanted - start) / (end - start)
            value = first.value + (second.value - first.value) * there
            return StepShare(value, (1 - there) * first.variance + there * second.variance)
    return dense[-1]


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient in float32; None is zero."""
    return torch.zeros_like(like) if gradient is None else gradient.float()


def _sum(tensor: Tensor) -> float:
    return float(tensor.sum())  # torch adds in a tree, also in float32
