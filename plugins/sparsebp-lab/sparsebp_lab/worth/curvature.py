"""What an error of the gradient costs the loss: its square with the loss's curvature between.

A step with the rate eta and the optimizer's scale D goes to w - eta D (g + e). To second order an error e whose mean is
zero raises the loss by eta^2 / 2 E[(D e)^T H (D e)], with the Hessian H of the loss: where the loss is flat an error
costs nothing in its step, however large it is. The error of a small batch lies where the loss is curved, since the
covariance of gradients and the Hessian resemble each other; that of rounding or of random projections lies everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsebp_lab.worth.squares import Gradients, Metric, inner, minus

# Of the length of all weights: large enough for float32, and so small that a difference to one side is within 2 % of
# autograd's product (tests/worker/test_worth.py). One to both sides would be closer, and takes twice the passes.
STEP = 1e-4


class Curvature:
    """The Hessian of a loss at the weights of a point, along one error at a time, by a difference of two gradients."""

    def __init__(self, parameters: Mapping[str, Tensor], metric: Metric, gradients: Gradients) -> None:
        self._parameters, self._metric, self._gradients = parameters, metric, gradients
        # Adapters begin at zero, or near it: a step in proportion to them would be lost in what they are added to.
        self._length = max(_length(parameters), 1.0)

    @staticmethod
    def is_measurable(parameters: Mapping[str, Tensor], mixed_precision: str) -> bool:
        """Whether weights and gradients are precise enough: a step so small is lost in 16 bits."""
        return mixed_precision == "no" and all(p.dtype in (torch.float32, torch.float64) for p in parameters.values())

    def square(self, error: Gradients, gradients: Callable[[], Gradients]) -> float:
        """Return (D e)^T H (D e), where D is the scale of the metric; ``gradients`` are those of the loss with the
        weights as they are when it is called. The weights are put back bit for bit."""
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
        # Without any moments a step is the gradient; a weight that alone has none was not trained so far.
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
