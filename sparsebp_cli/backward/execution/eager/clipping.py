"""Gradient clipping for gradients that do not exist at the same time.

It applies the arithmetic of :func:`torch.nn.utils.clip_grad_norm_` to one gradient at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sparsebp_cli.errors import UsageError

_WORDS = {
    "parameter": "the norm of each parameter's gradient",
    "previous": "the norm of all gradients in the previous step",
    "exact": "the norm of all gradients, which an extra backward computes first",
}


@dataclass(frozen=True)
class Clipping:
    """The bound on gradient norms, and the norm to compare with it.

    ``max_norm`` is greater than 0; None: no clipping. ``by`` is ``parameter``: each gradient by its own norm;
    ``previous``: all by the total norm of the previous step, and in the first step each by its own norm; ``exact``: all
    by their total norm, which an extra backward pass computes first.
    """

    max_norm: float | None = None
    by: str | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not _is_positive(self.max_norm):
            raise UsageError(f"max_grad_norm must be a number greater than 0, got {self.max_norm!r}")

    def describe(self) -> str:
        """Return a phrase for the report."""
        if self.by is None:
            return "gradients are not clipped"
        return f"gradients are clipped to {self.max_norm:g} by {_WORDS[self.by]}"

    def clip(self, parameter: Tensor, norm: Tensor, total_norm: Tensor | None) -> None:
        """Clip the gradient of one parameter, given its norm.

        ``total_norm`` is the norm of all gradients in this step or the previous one; None if unknown.
        """
        if self.max_norm is None:
            return
        by = norm if self.by == "parameter" or total_norm is None else total_norm
        if self.by == "previous":
            by = by.float()  # a resumed run reads a float32 norm from its checkpoint
        clip_grads_with_norm_([parameter], self.max_norm, by)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def norm_of(gradient: Tensor) -> Tensor:
    """Return the 2-norm of one gradient, on its device."""
    return get_total_norm([gradient.coalesce().values() if gradient.is_sparse else gradient])


def total_of(norms: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, as a scalar tensor.

    ``norms`` must be in the order of the parameters, because the order of a sum changes its last bits.
    """
    first = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), 2.0)
    return total
