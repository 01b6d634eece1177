"""The vocabulary between policies and engine: which part of a gradient goes on.

Each Selection defines its meaning once, in ``apply``: the dense gradient with everything else set to zero (and what
is kept multiplied by its weight). Every fast kernel must equal the dense backward of ``selection.apply(grad_NO)``.

Shape letters: N rows (= B*T), O output width, K kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import Tensor


class Selection(ABC):
    """Which entries of one gradient are kept. ``None`` in place of a Selection means dense: all of them."""

    @abstractmethod
    def apply(self, grad_NO: Tensor) -> Tensor:
        """Return the masked, dense gradient that this selection stands for.

        Args:
            grad_NO: Gradient of a site's output, rows by features. It is not changed.

        Returns:
            A new tensor of the same shape, dtype and device.
        """

    @abstractmethod
    def num_kept(self, grad_NO: Tensor) -> int | Tensor:
        """Return how many entries of ``grad_NO`` are kept; a 0-d tensor where counting on the host would stall.

        Args:
            grad_NO: The gradient that was selected from.

        Returns:
            A count in ``[0, grad_NO.numel()]``.
        """


@final
@dataclass(frozen=True)
class Rows(Selection):
    """Token rows.

    Args:
        index_K: int64 row numbers, each at most once, in any order, on the gradient's device.
        weight_K: Factor of each kept row (1/probability makes a random choice unbiased); None means 1.
    """

    index_K: Tensor
    weight_K: Tensor | None = None

    def apply(self, grad_NO: Tensor) -> Tensor:
        kept_KO = grad_NO.index_select(0, self.index_K)
        if self.weight_K is not None:
            kept_KO = kept_KO * self.weight_K.to(grad_NO.dtype)[:, None]
        return grad_NO.new_zeros(grad_NO.shape).index_copy_(0, self.index_K, kept_KO)

    def num_kept(self, grad_NO: Tensor) -> int:
        return self.index_K.numel() * grad_NO.shape[1]


@final
@dataclass(frozen=True)
class Columns(Selection):
    """Output features, the same for every row (meProp's unified top-k, arXiv 1706.06197).

    Args:
        index_K: int64 feature numbers, each at most once, in any order, on the gradient's device.
        weight_K: Factor of each kept feature; None means 1.
    """

    index_K: Tensor
    weight_K: Tensor | None = None

    def apply(self, grad_NO: Tensor) -> Tensor:
        kept_NK = grad_NO.index_select(1, self.index_K)
        if self.weight_K is not None:
            kept_NK = kept_NK * self.weight_K.to(grad_NO.dtype)
        return grad_NO.new_zeros(grad_NO.shape).index_copy_(1, self.index_K, kept_NK)

    def num_kept(self, grad_NO: Tensor) -> int:
        return self.index_K.numel() * grad_NO.shape[0]


@final
@dataclass(frozen=True)
class Elements(Selection):
    """Single entries: the literal semantics of "keep the k largest". Not expected to be faster than dense.

    Args:
        mask_NO: Boolean, True where the entry is kept, on the gradient's device.
        weight: Factor of every kept entry; 1.0 keeps them as they are.
    """

    mask_NO: Tensor
    weight: float = 1.0

    def apply(self, grad_NO: Tensor) -> Tensor:
        kept_NO = grad_NO.masked_fill(~self.mask_NO, 0.0)
        return kept_NO if self.weight == 1.0 else kept_NO * self.weight

    def num_kept(self, grad_NO: Tensor) -> Tensor:  # noqa: ARG002 - the mask knows
        return self.mask_NO.sum()
