"""Check that a gradient estimator keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_cli.testing import check_repeatable, name_of, require
from sparsebp_shelf.estimator.kind import DirectionDraw, GradientEstimator

NUM_STEPS = 400
_NUM_DRAWS = 1000
_NUM_SIGMAS = 6.0  # seeds fix the draws; a correct policy fails for one seed in 500 million
_SHAPE = (2, 3)


def check_gradient_estimator(policy: GradientEstimator) -> None:
    """Check a gradient estimator against every promise of the contract, on a quadratic loss of six weights."""
    for check in _CHECKS:
        check(policy)


def _step(index: int) -> Step:
    return Step(index, num_steps=NUM_STEPS)


def _draw(policy: GradientEstimator, step: Step) -> Tensor:
    return policy.draw(_SHAPE, step.generator(DirectionDraw("weight")))


def _loss(weight: Tensor) -> float:
    """Return a quadratic loss whose minimum is not at 0 and whose curvature mixes the weights."""
    flat = weight.double().flatten()
    mixed = flat.cumsum(0) - torch.arange(1, 7, dtype=torch.float64)
    return float(0.5 * mixed.square().sum() + flat[0] * flat[5])


def _gradient(weight: Tensor) -> Tensor:
    flat = weight.double().flatten()
    mixed = flat.cumsum(0) - torch.arange(1, 7, dtype=torch.float64)
    gradient = mixed.flip(0).cumsum(0).flip(0)
    gradient[0] += flat[5]
    gradient[5] += flat[0]
    return gradient


_WEIGHT = torch.linspace(-1.0, 1.5, 6, dtype=torch.float64)


def _losses(policy: GradientEstimator, step: Step) -> tuple[Tensor, list[float]]:
    """Return the direction, of 6 entries, and the losses at its points."""
    direction_6 = _draw(policy, step).double().flatten()
    return direction_6, [_loss(_WEIGHT + shift * direction_6) for shift in policy.shifts]


def _estimate(policy: GradientEstimator, step: Step) -> Tensor:
    direction_6, loss_S = _losses(policy, step)
    return policy.estimate(loss_S, step) * direction_6


def _check_numbers(policy: GradientEstimator) -> None:
    for index in range(NUM_STEPS):
        at = policy.at(_step(index))
        shifts = tuple(at.shifts)
        good = len(set(shifts)) == len(shifts) >= 2 and all(map(math.isfinite, shifts))
        require(good, f"{name_of(policy)}: shifts must be at least two different finite numbers, got {shifts}")


def _check_draw(policy: GradientEstimator) -> None:
    check_repeatable(policy, _draw, _step(3))
    first = _draw(policy, _step(3))
    good = first.shape == _SHAPE and first.dtype == torch.float32 and bool(first.isfinite().all())
    require(good, f"{name_of(policy)}: draw must return finite float32 numbers of the parameter's shape")
    require(not torch.equal(first, _draw(policy, _step(4))), f"{name_of(policy)}: draws one direction at all steps")


def _check_linear(policy: GradientEstimator) -> None:
    """Check that the estimates of micro-batches add up to the estimate of the step."""
    step = _step(0)
    at = policy.at(step)
    _, losses = _losses(at, step)
    other = [math.sin(7.0 * loss) for loss in losses]
    both = [a + b for a, b in zip(losses, other, strict=True)]
    one, two, whole = (at.estimate(loss_S, step) for loss_S in (losses, other, both))
    text = f"{name_of(policy)}: estimate is not linear in the losses, so micro-batches do not add up to a step"
    require(abs(one + two - whole) <= 1e-5 * max(map(abs, (one, two, whole))), text)


def _check_unbiased(policy: GradientEstimator) -> None:
    if not policy.unbiased:
        return
    at = policy.at(_step(0))
    estimate_D6 = torch.stack([_estimate(at, _step(index)) for index in range(_NUM_DRAWS)])
    gradient_6 = _gradient(_WEIGHT)
    # Compare each entry, and the length along the gradient, which detects an estimate that is too long first.
    along = torch.cat([torch.eye(6, dtype=torch.float64), gradient_6[:, None] / gradient_6.norm()], 1)
    drawn_D7, wanted_7 = estimate_D6 @ along, gradient_6 @ along
    error_7 = (drawn_D7.mean(0) - wanted_7).abs()
    allowed_7 = _NUM_SIGMAS * drawn_D7.std(0) / math.sqrt(_NUM_DRAWS) + 1e-6
    text = f"{name_of(policy)}: says it is unbiased, but its mean is not the gradient of a quadratic loss"
    require(bool((error_7 <= allowed_7).all()), text)


_CHECKS: tuple[Callable[[GradientEstimator], None], ...] = (_check_numbers, _check_draw, _check_linear, _check_unbiased)
