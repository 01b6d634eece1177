"""How gradients are clipped that are never there together.

The arithmetic is that of :func:`torch.nn.utils.clip_grad_norm_`, on one gradient at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sparsebp_cli.errors import UsageError

_WORDS = {
    "parameter": "the norm of each",
    "previous": "the norm of all in the step before",
    "exact": "the norm of all, for which a backward of its own runs first",
}


@dataclass(frozen=True)
class Clipping:
    """What is clipped to what.

    Args:
        max_norm: Greater than 0; None: nothing is clipped.
        by: ``parameter``, each gradient by its own norm; ``previous``, all by the norm that the gradients of the step
            before had together, and at the first step each by its own; ``exact``, all by their norm together, which a
            backward pass of its own finds out first.

    Raises:
        UsageError: ``max_norm`` is out of range, or ``by`` is unknown.
    """

    max_norm: float | None = None
    by: str | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not _is_positive(self.max_norm):
            raise UsageError(f"max_grad_norm must be a number greater than 0, got {self.max_norm!r}")

    def tell(self) -> str:
        """Return in words what is clipped, and how."""
        if self.by is None:
            return "gradients are not clipped"
        return f"gradients are clipped to {self.max_norm:g} by {_WORDS[self.by]}"

    def clip(self, parameter: Tensor, norm: Tensor, total_norm: Tensor | None) -> None:
        """Clip the gradient of one parameter.

        Args:
            parameter: With its gradient.
            norm: The gradient's own.
            total_norm: Of all gradients of this step or the one before; None: not known.
        """
        if self.max_norm is None:
            return
        by = norm if self.by == "parameter" or total_norm is None else total_norm
        if self.by == "previous":
            by = by.float()  # as a resumed run reads it from its checkpoint
        clip_grads_with_norm_([parameter], self.max_norm, by)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def norm_of(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one gradient, on its device."""
    return get_total_norm([gradient.coalesce().values() if gradient.is_sparse else gradient])


def total_of(norms: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together.

    Args:
        norms: Of each, at least one, in the order of the parameters: the order of a sum shows in its last bits.

    Returns:
        A tensor of no dimension.
    """
    first = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)
    return total
