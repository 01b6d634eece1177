"""Estimate gradients from losses at shifted weights, without a backward.

Each shifted weight is computed from a copy of the original one, so rounding errors never add up. At the end the copy is
written back: the weights are bit-identical to before. The gradient then reuses the copy's memory. The extension draws a
direction again from the same seed each time, and holds it for one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward import DensePass, EngineExtension, PassEstimate
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Step, returned
from sparsebp_shelf.estimator.kind import DirectionDraw, GradientEstimator

if TYPE_CHECKING:
    from sparsebp_cli.backward import EngineView, Given


@final
class EstimatorExtension(EngineExtension):
    """Run a gradient estimator on one model."""

    policy: GradientEstimator

    def __init__(self, policy: GradientEstimator, model: nn.Module, given: Given) -> None:  # noqa: ARG002 - as of all
        self.policy, self._model = policy, model

    def install(self, engine: EngineView) -> None:
        number = len(self.policy.shifts)
        engine.notes["estimate"] = (
            f"{type(self.policy).__name__} estimates gradients from {number} forwards of each micro-batch in "
            "evaluation mode, without dropout; there is no backward"
        )

    @override
    def check_called(self) -> None:
        """Raise an error: this policy has no backward."""
        raise UsageError(
            f"{type(self.policy).__name__} estimates gradients without a backward: call engine.estimate(forward) "
            "instead of forward and engine.backward"
        )

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the fractions of a dense pass: no backward."""
        flops = dense.flops
        return PassEstimate(
            backward=dict.fromkeys(flops.backward, 0.0),
            recomputed=dict.fromkeys([*flops.recomputed, *flops.forward], 0.0),
            forward=dict.fromkeys(flops.forward, float(len(self.policy.shifts))),
        )

    @override
    def estimate(self, forward: Callable[[], Tensor], step: Step) -> Tensor:
        """Add the estimate for one micro-batch to ``.grad`` of the trained parameters, and return its mean loss.

        The mean is over all points.
        """
        step = replace(step, micro_batch=0, call=0, rank=0)
        policy = self.policy.at(step)
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError(
                f"{type(policy).__name__} estimates the gradients of trained parameters, but the model trains none"
            )
        plain = {name: p.detach().clone() for name, p in trained.items()}
        losses: list[Tensor] = []
        with torch.no_grad(), _evaluating(self._model):
            try:
                for shift in policy.shifts:
                    for name, parameter in trained.items():
                        parameter.copy_(plain[name] + shift * self._draw(policy, step, name, parameter))
                    losses.append(forward().detach().double())
            finally:
                for name, parameter in trained.items():
                    parameter.copy_(plain[name])
            loss_S = torch.stack(losses)
            coefficient = policy.estimate(loss_S.tolist(), step)
            returned.require_type(f"{type(policy).__name__}.estimate", coefficient, float, int)
            for name, parameter in trained.items():
                gradient = plain[name].copy_(coefficient * self._draw(policy, step, name, parameter))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
        return loss_S.mean()

    @staticmethod
    def _draw(policy: GradientEstimator, step: Step, name: str, parameter: Tensor) -> Tensor:
        generator = step.generator(DirectionDraw(name), parameter.device)
        return policy.draw(parameter.shape, generator)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode inside the block, and restore each module's mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
