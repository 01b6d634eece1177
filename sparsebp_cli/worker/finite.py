"""A run whose numbers are no longer finite ends, and says where; nothing is updated by them."""

from __future__ import annotations

import math

from torch import nn

from sparsebp_cli.errors import DivergedError
from sparsebp_cli.worker.sharding import own_part


def finite_loss(value: float, step: int) -> float:
    """Return a loss that is finite.

    Args:
        value: Of all ranks together.
        step: From 1.

    Returns:
        The value.

    Raises:
        DivergedError: It is infinite or not a number.
    """
    if not math.isfinite(value):
        raise DivergedError(f"the loss is {value} at step {step}; nothing was updated")
    return value


def finite_norm(value: float, model: nn.Module, step: int) -> float:
    """Return a gradient norm that is finite.

    Args:
        value: Over all gradients.
        model: Holds them: the first bad one is named.
        step: From 1.

    Returns:
        The value.

    Raises:
        DivergedError: It is infinite or not a number.
    """
    if not math.isfinite(value):
        gradients = ((name, own_part(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
        bad = (name for name, gradient in gradients if not gradient.isfinite().all())
        raise DivergedError(
            f"the gradient norm is {value} at step {step}, first in {next(bad, 'the sum')}; nothing was updated"
        )
    return value
