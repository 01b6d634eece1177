"""Squares of gradients' differences, by part of the model, as they are and in the metric of AdamW.

AdamW divides each entry by the root of its second moment, so an error counts there as the optimizer sees it. The moment
is that of the training until here, which no measured batch is in: so the metric is one for all of them. Entries that
have hardly had a gradient (rows of an embedding) count as if their moment were a hundredth of their tensor's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor | None]
METRICS = ("plain", "adam")
# Without it, rows of an embedding that were hardly seen make up nearly all of the sum. See decision 108.
FLOOR = 0.01  # of the mean second moment of a tensor
MOMENT = "exp_avg_sq"  # where optimizers of Adam's family keep their second moments


@dataclass
class Squares:
    """Sums by metric and part of the model."""

    sums: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in METRICS})

    def add(self, part: str, product: Tensor, scaled: Tensor | None) -> None:
        """Add products of entries, and those in Adam's metric; None: there is no such metric."""
        self._add("plain", part, product)
        if scaled is not None:
            self._add("adam", part, scaled)

    def _add(self, metric: str, part: str, product: Tensor) -> None:
        of = self.sums[metric]
        of[part] = of.get(part, 0.0) + float(product.sum(dtype=torch.float64))


class Metric:
    """The scale of entries in the metric of an optimizer; ``names`` are the trained parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> None:
        self._scales: dict[str, Tensor] = {}  # one over the root of the moment
        for name, parameter in names.items():
            moment = optimizer.state.get(parameter, {}).get(MOMENT)
            if isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.any():
                self._scales[name] = (moment.float() + FLOOR * moment.float().mean()).rsqrt()

    @property
    def exists(self) -> bool:
        """Whether the optimizer has second moments."""
        return bool(self._scales)

    def scale(self, name: str, entries: Tensor) -> Tensor | None:
        """Return entries over the root of their second moment; None if there is none. What corrects all moments for the
        start of a training is a factor, which cancels."""
        scale = self._scales.get(name)
        return None if scale is None else entries * scale

    def moment(self, name: str) -> Tensor | None:
        """Return the second moments that :meth:`scale` divides by the root of; None if there are none."""
        scale = self._scales.get(name)
        return None if scale is None else scale.square().reciprocal()


def square_between(first: Gradients, second: Gradients, metric: Metric, part_of: Callable[[str], str]) -> Squares:
    """Return |g1 - g2|^2 / 2 of the dense gradients of two batches."""
    found = Squares()
    for name in first:
        difference = minus(first[name], second[name])
        if difference is not None:
            scaled = metric.scale(name, difference)
            found.add(part_of(name), difference.square() / 2, None if scaled is None else scaled.square() / 2)
    return found


def square_errors(
    dense: Gradients, draws: tuple[Gradients, Gradients], metric: Metric, part_of: Callable[[str], str]
) -> tuple[Squares, Squares]:
    """Return |p1 - p2|^2 / 2 of two draws of a policy on one batch, whose mean is the variance of a draw, and
    (p1 - g)(p2 - g), whose mean is the square of the mean error."""
    noise, bias = Squares(), Squares()
    for name, gradient in dense.items():
        one, other = (minus(draw[name], gradient) for draw in draws)
        some = one if one is not None else other
        if some is None:
            continue
        first = torch.zeros_like(some) if one is None else one
        second = torch.zeros_like(some) if other is None else other
        scaled = [metric.scale(name, error) for error in (first, second)]
        of_noise = of_bias = None
        if scaled[0] is not None and scaled[1] is not None:
            of_noise, of_bias = (scaled[0] - scaled[1]).square() / 2, scaled[0] * scaled[1]
        noise.add(part_of(name), (first - second).square() / 2, of_noise)
        bias.add(part_of(name), first * second, of_bias)
    return noise, bias


def minus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return a difference of gradients in float32, of which None is zero; None if both are."""
    if one is None and other is None:
        return None
    if one is None:
        return -other.float()  # type: ignore[union-attr]
    return one.float() if other is None else one.float() - other.float()
