"""Selections: the part of a gradient that a policy keeps, in the form that it passes to the engine.

``apply`` defines what each Selection means: it multiplies kept entries by their weight and sets all others to zero.
Every fast kernel must equal the dense backward of ``selection.apply(grad_NO)``. All selections are by count, so that
the host never waits for a count from the device.

Shape letters: N rows (= B*T), O output width, K kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor


class Selection(ABC):
    """The kept entries of one gradient. ``None`` instead of a Selection keeps all entries (dense)."""

    @abstractmethod
    def apply(self, grad_NO: Tensor) -> Tensor:
        """Return a new dense gradient, rows by features, in which entries that are not kept are zero."""

    @abstractmethod
    def num_kept(self, grad_NO: Tensor) -> int | Tensor:
        """Return how many entries of ``grad_NO`` are kept, as a 0-d tensor where counting on the host would stall.

        Args:
            grad_NO: The gradient that was selected from.

        Returns:
            A count in ``[0, grad_NO.numel()]``.
        """


@final
@dataclass(frozen=True)
class Rows(Selection):
    """The kept token positions, each with a weight.

    Args:
        index_K: int64 row numbers, each at most once, in any order, on the gradient's device.
        weight_K: Factor of each kept row (1/probability makes a random choice unbiased); None means 1.
        num_examples: Number of equal parts of ``index_K``, where part b has only rows of example b. 1 promises
            nothing. With equal parts, the engine can recompute attention for the kept rows without copying the
            number of rows of each example to the host.
    """

    index_K: Tensor
    weight_K: Tensor | None = None
    num_examples: int = 1

    def apply(self, grad_NO: Tensor) -> Tensor:
        kept_KO = self.gather(grad_NO)
        return grad_NO.new_zeros(grad_NO.shape).index_copy_(0, self.index_K, kept_KO)

    def gather(self, grad_NO: Tensor) -> Tensor:
        """Return the kept rows, (K, O), multiplied by their weights."""
        kept_KO = grad_NO.index_select(0, self.index_K)
        return kept_KO if self.weight_K is None else kept_KO * self.weight_K.to(grad_NO.dtype)[:, None]

    def num_kept(self, grad_NO: Tensor) -> int:
        return self.index_K.numel() * grad_NO.shape[1]


@final
@dataclass(frozen=True)
class Columns(Selection):
    """The kept output features, the same for every row (meProp's unified top-k, arXiv 1706.06197).

    Args:
        index_K: int64 feature numbers, each at most once, in any order, on the gradient's device.
        weight_K: Factor of each kept feature; None means 1.
    """

    index_K: Tensor
    weight_K: Tensor | None = None

    def apply(self, grad_NO: Tensor) -> Tensor:
        return grad_NO.new_zeros(grad_NO.shape).index_copy_(1, self.index_K, self.gather(grad_NO))

    def gather(self, grad_NO: Tensor) -> Tensor:
        """Return the kept features, (N, K), multiplied by their weights."""
        kept_NK = grad_NO.index_select(1, self.index_K)
        return kept_NK if self.weight_K is None else kept_NK * self.weight_K.to(grad_NO.dtype)

    def num_kept(self, grad_NO: Tensor) -> int:
        return self.index_K.numel() * grad_NO.shape[0]


@final
@dataclass(frozen=True)
class Elements(Selection):
    """Single entries: the literal semantics of "keep the k largest". Never faster than dense in our measurements.

    Args:
        index_K: int64 indices of the kept entries, counted row by row (row * O + feature), each at most once, in any
            order, on the gradient's device.
        weight: Factor of every kept entry; 1.0 keeps them as they are.
    """

    index_K: Tensor
    weight: float = 1.0

    def apply(self, grad_NO: Tensor) -> Tensor:
        masked = grad_NO.new_zeros(grad_NO.numel()).index_copy_(0, self.index_K, self.gather(grad_NO))
        return masked.view(grad_NO.shape)

    def gather(self, grad_NO: Tensor) -> Tensor:
        """Return the kept entries, (K,), multiplied by the weight."""
        kept_K = grad_NO.reshape(-1).index_select(0, self.index_K)
        return kept_K if self.weight == 1.0 else kept_K * self.weight

    @override
    def num_kept(self, grad_NO: Tensor) -> int:
        return self.index_K.numel()


@final
@dataclass(frozen=True)
class Blocks(Selection):
    """Rectangles of a grid over rows and features. Blocks at the lower and right edge may be smaller.

    Args:
        index_K: int64 indices of the kept blocks, counted row by row over the grid, each at most once, in any order,
            on the gradient's device.
        block_shape: Rows and features of a block, each at least 1.
        weight_K: Factor of each kept block; None means 1.
    """

    index_K: Tensor
    block_shape: tuple[int, int]
    weight_K: Tensor | None = None

    def grid(self, grad_NO: Tensor) -> tuple[int, int]:
        """Return the numbers of blocks over the rows and over the features."""
        rows, columns = grad_NO.shape
        return -(-rows // self.block_shape[0]), -(-columns // self.block_shape[1])

    def apply(self, grad_NO: Tensor) -> Tensor:
        import torch

        high, wide = self.grid(grad_NO)
        dtype = torch.promote_types(grad_NO.dtype, torch.float32)
        factor = torch.zeros(high * wide, dtype=dtype, device=grad_NO.device)
        weight_K = torch.ones_like(self.index_K, dtype=dtype) if self.weight_K is None else self.weight_K.to(dtype)
        factor.index_copy_(0, self.index_K, weight_K)
        factor_NO = self._spread(factor.to(grad_NO.dtype), grad_NO)
        return grad_NO.masked_fill(factor_NO == 0, 0.0) * factor_NO

    def num_kept(self, grad_NO: Tensor) -> Tensor:
        (rows, columns), (num_rows, num_columns) = self.block_shape, grad_NO.shape
        _, wide = self.grid(grad_NO)
        height_K = (num_rows - self.index_K // wide * rows).clamp(max=rows)
        width_K = (num_columns - self.index_K % wide * columns).clamp(max=columns)
        return (height_K * width_K).sum()

    def _spread(self, value: Tensor, grad_NO: Tensor) -> Tensor:
        (rows, columns), (num_rows, num_columns) = self.block_shape, grad_NO.shape
        grid = value.view(self.grid(grad_NO))
        return grid.repeat_interleave(rows, 0)[:num_rows].repeat_interleave(columns, 1)[:, :num_columns]


@final
@dataclass(frozen=True)
class TwoToFour(Selection):
    """Two of every four neighbouring features in each row, which sparse tensor cores multiply at up to twice the rate.

    Args:
        mask_NO: Boolean, True where the entry is kept: two in each group of four features, on the gradient's device.
            A last group of fewer than four is kept whole.
        weight: Factor of the kept entries of whole groups; 1.0 keeps them as they are.
    """

    mask_NO: Tensor
    weight: float = 1.0

    def apply(self, grad_NO: Tensor) -> Tensor:
        kept_NO = grad_NO.masked_fill(~self.mask_NO, 0.0)
        if self.weight != 1.0:
            kept_NO[:, : grad_NO.shape[1] // 4 * 4] *= self.weight
        return kept_NO

    def num_kept(self, grad_NO: Tensor) -> int:
        num_rows, num_columns = grad_NO.shape
        return num_rows * (num_columns // 4 * 2 + num_columns % 4)


@final
@dataclass(frozen=True)
class Groups(Selection):
    """A few entries of every group of neighbours, each with its own weight. The engine multiplies them densely: this
    package has no faster kernel for them.

    Args:
        weight_NO: Factor of each entry, finite, 0 for an entry that is cut, on the gradient's device. A smaller last
            group keeps the same number of entries, or all if it has fewer.
        num_of: (entries of each group that are kept, entries of a group).
        along_rows: Whether a group is part of a column, as in a sum over rows; else it is part of a row.
    """

    weight_NO: Tensor
    num_of: tuple[int, int]
    along_rows: bool = False

    def apply(self, grad_NO: Tensor) -> Tensor:
        return grad_NO.masked_fill(self.weight_NO == 0, 0.0) * self.weight_NO.to(grad_NO.dtype)

    def num_kept(self, grad_NO: Tensor) -> int:
        length, others = grad_NO.shape if self.along_rows else grad_NO.shape[::-1]
        kept, group = self.num_of
        return others * (length // group * kept + min(kept, length % group))


@final
@dataclass(frozen=True)
class Values(Selection):
    """A replacement for every entry of a gradient, such as a rounded value. The engine multiplies densely.

    Args:
        value_NO: The values, finite, on the gradient's device; 0 where an entry is cut.
    """

    value_NO: Tensor

    def apply(self, grad_NO: Tensor) -> Tensor:
        return self.value_NO.to(grad_NO.dtype, copy=True)

    def num_kept(self, grad_NO: Tensor) -> Tensor:  # noqa: ARG002 - the signature of every selection
        return self.value_NO.count_nonzero()


@final
@dataclass(frozen=True)
class Split:
    """One selection for the gradient of the input, and another for the gradients of weight and bias.

    Args:
        dgrad: Selection for the gradient of the input; None keeps everything.
        wgrad: Selection for the gradient of the weight; None keeps everything.
        full_bias: Whether the bias gets the whole gradient; otherwise it gets the part that ``wgrad`` keeps.
    """

    dgrad: Selection | None
    wgrad: Selection | None
    full_bias: bool = False

    def num_kept(self, grad_NO: Tensor) -> float | Tensor:
        """Return how many entries of ``grad_NO`` are kept, as the mean over both selections.

        Args:
            grad_NO: The gradient that was selected from.

        Returns:
            A count in ``[0, grad_NO.numel()]``.
        """
        counts = [grad_NO.numel() if part is None else part.num_kept(grad_NO) for part in (self.dgrad, self.wgrad)]
        return (counts[0] + counts[1]) / 2
