"""The comparison of a packed pass with the plain one, on one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor, nn

# Relative errors of the whole gradient that rounding explains, by the coarsest dtype in the computation. Wrong masks or
# positions give errors above 1e-2 in every dtype.
LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Check:
    """The result of one comparison."""

    error: float  # 2-norm of the difference of the gradients over the 2-norm of the plain one
    limit: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.limit


def compare_gradients(model: nn.Module, plain: Callable[[], Tensor], packed: Callable[[], Tensor]) -> Check:
    """Compare the gradients of two computations of one loss; neither ``.grad`` nor a hook on it is touched."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(plain(), parameters, allow_unused=True)
    got = torch.autograd.grad(packed(), parameters, allow_unused=True)
    squares, norm = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for one, other in zip(expected, got, strict=True):
        if one is None and other is None:
            continue
        exact = torch.zeros_like(other) if one is None and other is not None else one
        found = torch.zeros_like(one) if other is None and one is not None else other
        assert exact is not None
        assert found is not None
        squares += (found.double() - exact.double()).square().sum().cpu()
        norm += exact.double().square().sum().cpu()
    error = float((squares / norm).sqrt()) if norm else float(squares.sqrt())
    return Check(float("inf") if isnan(error) else error, limit_of(model))


def limit_of(model: nn.Module) -> float:
    """Return the relative error that rounding explains in a model."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.dtype in LIMITS}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    return max((LIMITS[kind] for kind in kinds if kind in LIMITS), default=LIMITS[torch.float32])
