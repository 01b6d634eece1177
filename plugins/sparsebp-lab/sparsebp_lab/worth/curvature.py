"""Compute what a gradient error costs the loss: its square, weighted by the loss's curvature.

A step with the rate eta and the optimizer's scale D goes to w - eta D (g + e). To second order an error e with mean
zero raises the loss by eta^2 / 2 E[(D e)^T H (D e)], with the Hessian H of the loss. In flat directions an error costs
nothing in its step, however large it is. The error of a small batch lies in curved directions, since the covariance of
gradients resembles the Hessian. The error of rounding or random projections lies in all directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsebp_lab.worth.squares import Gradients, WorthMetric, inner, minus

# Relative to the length of all weights: large enough for float32, and so small that a one-sided difference is within 2
# % of autograd's product (tests/worker/test_worth.py). A two-sided one would be closer, at twice the passes.
STEP = 1e-4


class Curvature:
    """The Hessian of a loss at a point's weights, applied to one error at a time by a gradient difference."""

    def __init__(self, parameters: Mapping[str, Tensor], metric: WorthMetric, gradients: Gradients) -> None:
        self._parameters, self._metric, self._gradients = parameters, metric, gradients
        # Adapters begin near zero: a step in proportion to them would vanish beside the weights that they are added to.
        self._length = max(_length(parameters), 1.0)

    @staticmethod
    def is_measurable(parameters: Mapping[str, Tensor], mixed_precision: str) -> bool:
        """Return whether weights and gradients are precise enough: 16 bits would lose such a small step."""
        return mixed_precision == "no" and all(p.dtype in (torch.float32, torch.float64) for p in parameters.values())

    def square(self, error: Gradients, gradients: Callable[[], Gradients]) -> float:
        """Return (D e)^T H (D e), where D is the scale of the metric; ``gradients`` returns the loss's gradients at the
        current weights. The weights are restored bit by bit."""
        direction = {name: entries for name, e in error.items() if e is not None for entries in [self._scale(name, e)]}
        length = _length(direction)
        if length == 0.0:
            return 0.0
        step = STEP * self._length / length
        with self._moved(direction, step):
            there = gradients()
        total = 0.0
        for name, along in direction.items():
            change = minus(there[name], self._gradients[name])
            if change is not None:
                total += inner(along, change)
        return total / step

    def _scale(self, name: str, error: Tensor) -> Tensor:
        scaled = self._metric.scale(name, error)
        if scaled is not None:
            return scaled
        # Without moments a step is the gradient. If only this weight has none, it was not trained so far.
        return torch.zeros_like(error) if self._metric.exists else error

    @contextmanager
    def _moved(self, direction: Mapping[str, Tensor], step: float) -> Iterator[None]:
        before = {name: self._parameters[name].detach().clone() for name in direction}
        try:
            with torch.no_grad():
                for name, along in direction.items():
                    self._parameters[name].add_(along.to(self._parameters[name].dtype), alpha=step)
            yield
        finally:
            with torch.no_grad():
                for name, values in before.items():
                    self._parameters[name].copy_(values)


def _length(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(inner(t.detach(), t.detach()) for t in tensors.values()))
