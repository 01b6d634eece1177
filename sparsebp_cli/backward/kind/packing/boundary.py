"""What leaves a packed forward: values at every position.

A position that was not computed has a constant. No gradient may arrive there: the plain step would send it through
the model, and here it would be lost. So every tensor that leaves goes through :func:`fill`, whose backward looks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebp_cli.errors import UnsupportedError

# Not 0, where the gradient of a square or of an absolute value is 0 and would not show that the loss reads it. See
# decision 33.
FILLER = 1.0


class ReadsUncomputedError(UnsupportedError):
    """A gradient arrived where the packed forward computed nothing."""


def fill(values: Tensor, computed: Tensor, what: str) -> Tensor:
    """Return values with a constant where nothing was computed; zeros without a graph, which nobody differentiates.

    Args:
        values: Values by position, (B, T, ...).
        computed: (B, T), whether a position was computed.
        what: Name of the values in the error, in the plural, such as ``logits``.

    Returns:
        The values, whose backward raises :class:`ReadsUncomputedError` if a gradient other than zero arrives at a
        position that was not computed: before any parameter has changed.
    """
    computed = computed.view(*computed.shape, *[1] * (values.dim() - 2))
    if not values.requires_grad:
        return values.masked_fill(~computed, 0)
    filled: Tensor = _Fill.apply(values, computed, what)  # type: ignore[no-untyped-call]
    return filled


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, computed: Tensor, what: str) -> Tensor:
        ctx.save_for_backward(computed)
        ctx.what = what
        return values.masked_fill(~computed, FILLER)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (computed,) = ctx.saved_tensors
        (grad,) = grads
        lost = (grad != 0) & ~computed
        if bool(lost.any()):
            number = int(lost.flatten(2).any(-1).sum()) if lost.dim() > 2 else int(lost.sum())
            raise ReadsUncomputedError(
                f"the loss reads {ctx.what} at {number:,} positions that lossless did not compute, so its gradient "
                "would be wrong: leave them out of the loss (padding, and whatever has no label), or give no labels to "
                "the forward or engine.columns if the loss reads other positions than those with a label"
            )
        return grad.masked_fill(~computed, 0), None, None
