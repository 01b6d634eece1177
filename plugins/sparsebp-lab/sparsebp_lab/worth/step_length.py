"""What is left of the length of Adam's step beside a policy's noise.

Adam divides each entry of the gradient by the root of its second moment, and that holds whatever noise the gradient
has: noise in any direction, also where the loss is flat, makes the step shorter. With the square s of the mean
gradient, dense's second moment v, and the variance e of the policy's own draws in a step's batch, a step goes downhill
by sum(s / sqrt(v)) times the rate without the noise, and by sum(s / sqrt(v + e)) with it. Their ratio is the share of
the learning rate that the policy trains with. A smaller batch has such a share as well, with the variance between
batches for e; dense's surface over batches has it in it (docs/results/exchange/PROTOCOL.md, H7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from sparsebp_lab.worth.squares import Gradients, Metric, inner, minus

# Noise of a smaller batch of dense, over that of the batch, for which the share is taken; between them it is linear in
# the logarithm of the batch.
TIMES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Share:
    """An estimate with its variance, from a jackknife over pairs of batches, which also takes its bias out."""

    value: float
    variance: float

    @classmethod
    def of_jackknife(cls, whole: float, parts: Sequence[float]) -> Share:
        """Return the estimate from its value over all pairs, and its values without each of them."""
        number, mean = len(parts), fmean(parts)
        variance = (number - 1) / number * sum((part - mean) ** 2 for part in parts)
        return cls(number * whole - (number - 1) * mean, variance)

    @classmethod
    def of_mean(cls, shares: Sequence[Share]) -> Share:
        """Return the mean of independent estimates."""
        variance = sum(share.variance for share in shares) / len(shares) ** 2
        return cls(fmean(share.value for share in shares), variance)


class StepLength:
    """The step at the weights of one point, from the dense gradients of pairs of small batches.

    ``size`` is the number of examples of a small batch over that of a step: variances go as one over it.
    """

    def __init__(self, dense: Sequence[Gradients], metric: Metric, size: float) -> None:
        self._size, self._signal, self._between = size, dict[str, Tensor](), dict[str, list[Tensor]]()
        self._moment = {name: moment for name in dense[0] if (moment := metric.moment(name)) is not None}
        number = len(dense)
        for name, moment in self._moment.items():
            gradients = [_or_zero(one[name], moment) for one in dense]
            total = torch.stack(gradients).sum(0)
            # The mean of the products of different batches has the square of the mean for its mean.
            self._signal[name] = (total.square() - sum(g.square() for g in gradients)) / (number * (number - 1))
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            self._between[name] = [(one - other).square() * (size / 2) for one, other in pairs]
        # Moments are of gradients that were clipped, and of earlier ones: one factor takes them to those of today.
        today = sum(_sum(self._signal[name] + torch.stack(self._between[name]).mean(0)) for name in self._moment)
        factor = today / sum(map(_sum, self._moment.values()))
        self._moment = {name: moment * factor for name, moment in self._moment.items()}
        self.is_known = factor > 0.0 and self._downhill({}) > 0.0

    def share_with(self, noise: Sequence[Mapping[str, Tensor]], times: float = 1.0) -> Share:
        """Return the share that is left beside so many times the noise of each pair of batches: squares of a draw's
        error on small batches, by parameter; one that is missing has none."""
        names = self._moment.keys() & {name for of_pair in noise for name in of_pair}
        if not names:
            return Share(1.0, 0.0)
        by_name = {name: [_or_zero(one.get(name), self._moment[name]) for one in noise] for name in names}
        return self._jackknife(_leave_out(by_name, len(noise)), times * self._size)

    def shares_of_dense(self) -> list[Share]:
        """Return the share of batches of dense with so many :data:`TIMES` as much noise on top."""
        means = _leave_out(self._between, len(next(iter(self._between.values()))))
        return [self._jackknife(means, times) for times in TIMES]

    def _jackknife(self, means: Sequence[Mapping[str, Tensor]], times: float) -> Share:
        whole = self._downhill({}) or 1.0
        shares = [self._downhill(mean, times) / whole for mean in means]
        return Share.of_jackknife(shares[0], shares[1:])

    def _downhill(self, noise: Mapping[str, Tensor], times: float = 1.0) -> float:
        """Return how fast a step goes downhill beside so many times some noise, in units of the rate."""
        total = 0.0
        for name, signal in self._signal.items():
            moment, own = self._moment[name], noise.get(name)
            total += inner(signal, (moment if own is None else moment.add(own, alpha=times)).rsqrt())
        return total


def _leave_out(each: Mapping[str, Sequence[Tensor]], pairs: int) -> list[dict[str, Tensor]]:
    """Return the mean over all pairs, and those without each of them."""
    # Not as a difference from the total, which may be less than nothing where one pair is far above the others.
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


def share_of_batch(dense: Sequence[Share], noise: float) -> Share:
    """Return the share of the batch of dense with so much noise on top, from those for :data:`TIMES`."""
    wanted, points = math.log1p(max(0.0, noise)), zip(map(math.log1p, TIMES), dense, strict=True)
    for (start, first), (end, second) in pairwise(points):
        if wanted <= end:
            there = (wanted - start) / (end - start)
            value = first.value + (second.value - first.value) * there
            return Share(value, (1 - there) * first.variance + there * second.variance)
    return dense[-1]


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient in float32; None is zero."""
    return torch.zeros_like(like) if gradient is None else gradient.float()


def _sum(tensor: Tensor) -> float:
    return float(tensor.sum())  # in float32 torch adds up in a tree
