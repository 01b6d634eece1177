"""Compute squares of gradient differences, by part of the model, plain and in the metric of AdamW.

AdamW divides each entry by the root of its second moment, so the metric shows an error as the optimizer sees it. The
moment comes from the training so far, which has seen no measured batch, so all batches share one metric. Entries that
have hardly had a gradient (rows of an embedding) get at least a hundredth of their tensor's mean moment.
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
MOMENT = "exp_avg_sq"  # key of the second moments in optimizers of Adam's family


@dataclass
class Squares:
    """Sums by metric and part of the model."""

    sums: dict[str, dict[str, float]] = field(default_factory=lambda: {name: {} for name in METRICS})

    def add(self, part: str, one: Tensor, other: Tensor, scale: Tensor | None) -> None:
        """Add the product of two gradient differences, plain and, with ``scale``, in Adam's metric."""
        self._add("plain", part, inner(one, other))
        if scale is not None:
            scaled = one * scale
            self._add("adam", part, inner(scaled, scaled if other is one else other * scale))

    def _add(self, metric: str, part: str, product: float) -> None:
        of = self.sums[metric]
        of[part] = of.get(part, 0.0) + product

    def halved(self) -> Squares:
        """Return half of all sums."""
        return Squares({name: {part: value / 2 for part, value in of.items()} for name, of in self.sums.items()})


class WorthMetric:
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

    def scale_of(self, name: str) -> Tensor | None:
        """Return one over the root of the second moments of a parameter; None if it has none. The bias correction of
        the moments is a common factor, which cancels."""
        return self._scales.get(name)

    def scale(self, name: str, entries: Tensor) -> Tensor | None:
        """Return entries over the root of their second moment; None if there is none."""
        scale = self._scales.get(name)
        return None if scale is None else entries * scale

    def moment(self, name: str) -> Tensor | None:
        """Return the second moments by whose root :meth:`scale` divides; None if there are none."""
        scale = self._scales.get(name)
        return None if scale is None else scale.square().reciprocal()


def square_between(first: Gradients, second: Gradients, metric: WorthMetric, part_of: Callable[[str], str]) -> Squares:
    """Return |g1 - g2|^2 / 2 of the dense gradients of two batches."""
    found = Squares()
    for name in first:
        difference = minus(first[name], second[name])
        if difference is not None:
            found.add(part_of(name), difference, difference, metric.scale_of(name))
    return found.halved()


def square_gradient(gradients: Gradients, metric: WorthMetric, part_of: Callable[[str], str]) -> Squares:
    """Return |g|^2 of the dense gradient of a batch."""
    found = Squares()
    for name, gradient in gradients.items():
        if gradient is not None:
            entries = gradient.float()
            found.add(part_of(name), entries, entries, metric.scale_of(name))
    return found


def square_errors(
    dense: Gradients, draws: tuple[Gradients, Gradients], metric: WorthMetric, part_of: Callable[[str], str]
) -> tuple[Squares, Squares]:
    """Return |p1 - p2|^2 / 2 of two draws of a policy on one batch, whose mean is the variance of a draw, and (p1 -
    g)(p2 - g), whose mean is the squared bias. A policy without randomness returns the same gradient twice."""
    noise, bias = Squares(), Squares()
    is_one = draws[0] is draws[1]
    for name, gradient in dense.items():
        one = minus(draws[0][name], gradient)
        other = one if is_one else minus(draws[1][name], gradient)
        some = one if one is not None else other
        if some is None:
            continue
        part, scale = part_of(name), metric.scale_of(name)
        one, other = (torch.zeros_like(some) if each is None else each for each in (one, other))
        bias.add(part, one, other, scale)
        if not is_one:
            apart = one - other
            noise.add(part, apart, apart, scale)
    return noise.halved(), bias


def inner(one: Tensor, other: Tensor) -> float:
    """Return the sum of two tensors' products. A BLAS product is within 1e-5 of float64 for a million entries, in a
    tenth of the time."""
    return float(torch.dot(one.reshape(-1), other.reshape(-1)))


def minus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return a difference of gradients in float32, where None counts as zero; None if both are."""
    if one is None and other is None:
        return None
    if one is None:
        return -other.float()  # type: ignore[union-attr]
    return one.float() if other is None else one.float() - other.float()
