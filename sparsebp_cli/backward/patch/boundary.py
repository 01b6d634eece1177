"""The outputs of a forward that computed only some positions: values at every position, with checks of reads.

The script's loss must not read a position that was not computed, since this position's gradient would be lost. Three
checks detect such a read.

- The backward refuses a gradient that arrives at such a position. The filled values have the size of real ones, and no
  two entries are equal, so that even a loss that is flat at equal or small values has a gradient.
- A batch that is compared with the plain step has the plain values at these positions. Then a gradient that is zero
  there is also zero in the plain step, for any loss.
- In such a batch the loss also has a second value, from other numbers at these positions (``twin``). It differs if the
  loss reads them in any way, even without a gradient.
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

NOISE = (0.05, 1.0)  # noise added to a real row, and to a row of the second value, relative to the mean entry
_checked: ContextVar[dict[str, Tensor] | None] = ContextVar("checked", default=None)


class ReadsUncomputedError(UnsupportedError):
    """The script's loss reads a position that was not computed."""


@contextmanager
def checked(plain: dict[str, Tensor]) -> Iterator[None]:
    """Let the outputs of a forward in the block detect every read of positions that were not computed.

    Args:
        plain: Values of the plain step, (B, T, ...), by the ``what`` of :func:`fill`.
    """
    token = _checked.set(plain)
    try:
        yield
    finally:
        _checked.reset(token)


def fill(values: Tensor, computed: Tensor, what: str) -> Tensor:
    """Return values, filled with realistic ones at positions that were not computed, or with zeros without a graph.

    Args:
        values: Values by position, (B, T, ...).
        computed: (B, T), whether a position was computed.
        what: Name of the values in the error, in the plural, such as ``logits``.

    Returns:
        The values. Their backward raises :class:`ReadsUncomputedError` if a nonzero gradient arrives at a position that
        was not computed, before any parameter changes.
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
    """Raise the error for a loss whose value depends on positions that were not computed."""
    raise ReadsUncomputedError(_SENTENCE.format(what="outputs", number="positions"))


def _fill(values: Tensor, computed: Tensor, kind: int) -> Tensor:
    """Return values in which each position without a row has a copy of a computed row, plus noise with different
    entries. The host reads nothing, and the function makes one tensor of this size."""
    flat_NX, computed_N = values.flatten(0, 1).flatten(1), computed.to(values.device).flatten()
    number_N = torch.arange(len(computed_N), device=values.device)
    # Copy the previous computed row in the order of positions; for the second value the next one.
    places_N = computed_N if kind == 0 else computed_N.flip(0)
    last_N = torch.where(places_N, number_N, -1).cummax(0).values
    last_N = torch.where(last_N < 0, places_N.long().argmax(), last_N)
    if kind == 1:
        last_N = (len(computed_N) - 1 - last_N).flip(0)
    filled_NX = flat_NX.index_select(0, last_N)
    size = NOISE[kind] * flat_NX.abs().mean()
    noise_N = (12.9898 * (number_N + 1 + kind)).sin().to(values.dtype) * size
    noise_X = (78.233 * (torch.arange(flat_NX.shape[1], device=values.device) + 1 + kind)).sin().to(values.dtype)
    if kind == 1:  # far from the first value in every direction, so that its maximum, minimum and signs differ
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
    "the loss reads {what} at {number} that the policy skipped, so its gradient would be wrong: leave padding "
    "and positions without a label out of the loss, or pass no labels to the forward and to engine.columns"
)
