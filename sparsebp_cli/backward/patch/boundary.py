"""What leaves a forward that computed some positions only: values at every position.

The loss of a script must not read a position that was not computed: the plain step would send its gradient through the
model, and here it would be lost. Three things show that it does.

- A gradient that arrives there. What stands there is of the size of real values, and no two entries are equal, so a
  loss that is flat at equal or at small values has a gradient too.
- In a batch that is compared with the plain step, the plain values stand there. A gradient that is zero there is zero
  in the plain step as well, whatever the loss.
- In such a batch the loss has a second value, of other numbers at these positions (``twin``). It differs if the loss
  reads them in any way, also without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebp_cli.backward.patch.twin import Twin
from sparsebp_cli.errors import UnsupportedError

NOISE = (0.05, 1.0)  # of the mean size of an entry: what is added to a real row, and what to that of the second value
_checked: ContextVar[dict[str, Tensor] | None] = ContextVar("checked", default=None)


class ReadsUncomputedError(UnsupportedError):
    """The loss of a script reads a position at which nothing was computed."""


@contextmanager
def checked(plain: dict[str, Tensor]) -> Iterator[None]:
    """Let what leaves a forward in the block show every read of what was not computed.

    Args:
        plain: Values of the plain step, (B, T, ...), by the ``what`` of :func:`fill`.
    """
    token = _checked.set(plain)
    try:
        yield
    finally:
        _checked.reset(token)


def fill(values: Tensor, computed: Tensor, what: str) -> Tensor:
    """Return values with others in the range of real ones where nothing was computed; zeros without a graph.

    Args:
        values: Values by position, (B, T, ...).
        computed: (B, T), whether a position was computed.
        what: Name of the values in the error, in the plural, such as ``logits``.

    Returns:
        The values, whose backward raises :class:`ReadsUncomputedError` if a gradient other than zero arrives at a
        position that was not computed: before any parameter has changed.
    """
    if not values.requires_grad:
        return values.masked_fill(~computed.view(*computed.shape, *[1] * (values.dim() - 2)), 0)
    plain = _checked.get()
    known = None if plain is None else plain.get(what)
    filled: Tensor = _Fill.apply(values, computed, what, known)  # type: ignore[no-untyped-call]
    if plain is None:
        return filled
    return Twin.of(filled, _fill(values.detach(), computed, 1), refuse)


def refuse() -> None:
    """Raise the error of a loss whose value depends on what was not computed."""
    raise ReadsUncomputedError(_SENTENCE.format(what="outputs", number="positions"))


def _fill(values: Tensor, computed: Tensor, kind: int) -> Tensor:
    """Return values with a computed row beside each position that has none, and noise of which no two entries are
    equal. Nothing is read on the host, and one tensor of this size is made."""
    flat_NX, computed_N = values.flatten(0, 1).flatten(1), computed.to(values.device).flatten()
    number_N = torch.arange(len(computed_N), device=values.device)
    # The row before, in the order of positions; of the second kind the row behind.
    places_N = computed_N if kind == 0 else computed_N.flip(0)
    last_N = torch.where(places_N, number_N, -1).cummax(0).values
    last_N = torch.where(last_N < 0, places_N.long().argmax(), last_N)
    if kind == 1:
        last_N = (len(computed_N) - 1 - last_N).flip(0)
    filled_NX = flat_NX.index_select(0, last_N)
    size = NOISE[kind] * flat_NX.abs().mean()
    noise_N = (12.9898 * (number_N + 1 + kind)).sin().to(values.dtype) * size
    noise_X = (78.233 * (torch.arange(flat_NX.shape[1], device=values.device) + 1 + kind)).sin().to(values.dtype)
    if kind == 1:  # far from the first in every direction, so that a largest, a smallest and a sign are others
        filled_NX.mul_((2 * (4.1414 * number_N).sin().to(values.dtype)).masked_fill(computed_N, 1)[:, None])
        noise_X = 1 + noise_X
    filled_NX.addcmul_(noise_N.masked_fill(computed_N, 0)[:, None], noise_X[None])
    return filled_NX.view(values.shape)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, computed: Tensor, what: str, known: Tensor | None) -> Tensor:
        computed_BT = computed.view(*computed.shape, *[1] * (values.dim() - 2))
        ctx.save_for_backward(computed_BT)
        ctx.what = what
        if known is not None and known.shape == values.shape:
            return torch.where(computed_BT, values, known.to(values))
        return _fill(values, computed, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (computed,) = ctx.saved_tensors
        (grad,) = grads
        lost = (grad != 0) & ~computed
        if bool(lost.any()):
            number = int(lost.flatten(2).any(-1).sum()) if lost.dim() > 2 else int(lost.sum())
            raise ReadsUncomputedError(_SENTENCE.format(what=ctx.what, number=f"{number:,} positions"))
        return grad.masked_fill(~computed, 0), None, None, None


_SENTENCE = (
    "the loss reads {what} at {number} that were not computed, so its gradient "
    "would be wrong: leave them out of the loss (padding, and whatever has no label), or give no labels to "
    "the forward or engine.columns if the loss reads other positions than those with a label"
)
