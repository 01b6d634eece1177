"""Compressed forms of a linear's input, kept for the gradient of its weight.

Each form defines its meaning in ``restore``: the input that the gradient of the weight is computed with. Every fast
kernel must equal the dense product with ``restore()``. The gradient of the linear's input never needs any of it.

All forms are of fixed size, so that the host never waits for a count from the device.

Shape letters: N rows (= B*T), D input width, K kept, G groups, C features of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Self, final

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BYTES = 8  # of a row's or a column's number
_SMALL_INDEX_BYTES, _SMALL_INDEX = 4, 2**31  # of an entry's number, below so many entries


@dataclass(frozen=True)
class Saved(ABC):
    """What is kept of one input.

    Args:
        shape: N and D of the input.
    """

    shape: tuple[int, int]

    @abstractmethod
    def restore(self) -> Tensor:
        """Return the input that this stands for, (N, D), of the dtype that it had."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are kept, in the order of the fields."""
        return self.pack()[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are kept."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @final
    def pack(self) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Saved]]:
        """Return the tensors, and what makes this object of them again, which holds none."""
        import torch

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in values.items() if name not in tensors}
        return tuple(tensors.values()), partial(_unpack, type(self), tuple(tensors), rest)


def _unpack(
    form: type[Saved], names: tuple[str, ...], rest: Mapping[str, object], tensors: tuple[Tensor, ...]
) -> Saved:
    make: Callable[..., Saved] = form
    return make(**rest, **dict(zip(names, tensors, strict=True)))


@final
@dataclass(frozen=True)
class SavedRows(Saved):
    """Rows, multiplied by their weights; all others are zero.

    Args:
        row_KD: The kept rows, times their weights.
        index_K: int64 row numbers, on the input's device; a number that stands there twice has the sum of both.
    """

    row_KD: Tensor
    index_K: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, index_K: Tensor, weight_K: Tensor | None = None) -> Self:
        """Keep some rows of an input.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            index_K: int64 row numbers.
            weight_K: Factor of each kept row (1/probability makes a random choice unbiased); None means 1.

        Returns:
            The rows.
        """
        row_KD = x_ND.index_select(0, index_K)
        if weight_K is not None:
            row_KD = row_KD * weight_K.to(row_KD.dtype)[:, None]
        return cls((x_ND.shape[0], x_ND.shape[1]), row_KD, index_K)

    @staticmethod
    def count_bytes(num_kept: int, num_features: int, itemsize: int) -> int:
        """Return the bytes of so many rows."""
        return num_kept * (num_features * itemsize + INDEX_BYTES)

    def restore(self) -> Tensor:
        return self.row_KD.new_zeros(self.shape).index_add_(0, self.index_K, self.row_KD)


@final
@dataclass(frozen=True)
class SavedColumns(Saved):
    """Input features, the same for every row, multiplied by their weights; all others are zero.

    Args:
        column_NK: The kept features, times their weights.
        index_K: int64 feature numbers, each at most once, on the input's device.
    """

    column_NK: Tensor
    index_K: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, index_K: Tensor, weight_K: Tensor | None = None) -> Self:
        """Keep some features of an input.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            index_K: int64 feature numbers, each at most once.
            weight_K: Factor of each kept feature; None means 1.

        Returns:
            The features.
        """
        column_NK = x_ND.index_select(1, index_K)
        if weight_K is not None:
            column_NK = column_NK * weight_K.to(column_NK.dtype)
        return cls((x_ND.shape[0], x_ND.shape[1]), column_NK, index_K)

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of so many features."""
        return num_kept * (num_rows * itemsize + INDEX_BYTES)

    def restore(self) -> Tensor:
        return self.column_NK.new_zeros(self.shape).index_copy_(1, self.index_K, self.column_NK)


@final
@dataclass(frozen=True)
class SavedElements(Saved):
    """Single entries; all others are zero.

    Args:
        value_K: The kept entries, of the input's dtype.
        index_K: Their numbers, counted row by row (row * D + feature), each at most once, on the input's device:
            int32 where they fit, else int64.
    """

    value_K: Tensor
    index_K: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, index_K: Tensor) -> Self:
        """Keep some entries of an input.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            index_K: int64 numbers of the entries, each at most once.

        Returns:
            The entries.
        """
        import torch

        value_K = x_ND.reshape(-1).index_select(0, index_K)
        dtype = torch.int32 if x_ND.numel() < _SMALL_INDEX else torch.int64
        return cls((x_ND.shape[0], x_ND.shape[1]), value_K, index_K.to(dtype))

    @staticmethod
    def count_bytes(num_kept: int, num_entries: int, itemsize: int) -> int:
        """Return the bytes of so many entries out of ``num_entries``."""
        return num_kept * (itemsize + (_SMALL_INDEX_BYTES if num_entries < _SMALL_INDEX else INDEX_BYTES))

    def restore(self) -> Tensor:
        flat = self.value_K.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy_(0, self.index_K.long(), self.value_K).view(self.shape)


@final
@dataclass(frozen=True)
class SavedDirection(Saved):
    """One number for each group of neighbouring features of a row: how far they go along a direction that all share.

    Args:
        along_NG: Factor of the direction in each of a row's G groups, of the input's dtype.
        direction_C: The direction, of length 1; the last group may have fewer features than it.
    """

    along_NG: Tensor
    direction_C: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, direction_C: Tensor) -> Self:
        """Project each group of neighbouring features on a direction.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            direction_C: The direction, of length 1, in float32 at least; as many features are a group.

        Returns:
            The projections.
        """
        along_NG = _split_features(x_ND, len(direction_C)).to(direction_C.dtype) @ direction_C
        return cls((x_ND.shape[0], x_ND.shape[1]), along_NG.to(x_ND.dtype), direction_C.to(x_ND.dtype))

    @staticmethod
    def mean_direction(x_ND: Tensor, size: int) -> Tensor:
        """Return the mean of all groups of so many features, scaled to the length 1, in float32 at least; if it is
        zero, the direction of equal entries.
        """
        import torch

        mean_C = _split_features(x_ND, size).to(torch.promote_types(x_ND.dtype, torch.float32)).flatten(0, 1).mean(0)
        length = torch.linalg.vector_norm(mean_C)
        return torch.where(length == 0.0, size**-0.5, mean_C / torch.where(length == 0.0, 1.0, length))

    @staticmethod
    def count_bytes(num_groups: int, size: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of so many groups of ``size`` features in each row."""
        return (num_groups * num_rows + size) * itemsize

    def restore(self) -> Tensor:
        return (self.along_NG[:, :, None] * self.direction_C).flatten(1)[:, : self.shape[1]]


def _split_features(x_ND: Tensor, size: int) -> Tensor:
    """Return the groups of ``size`` neighbouring features, (N, G, size), the last one filled up with zeros."""
    from torch.nn.functional import pad

    return pad(x_ND, (0, -x_ND.shape[1] % size)).reshape(x_ND.shape[0], -1, size)


@final
@dataclass(frozen=True)
class SavedRepresentatives(Saved):
    """A few rows that stand for all: every row is a multiple of one of them.

    Args:
        row_KD: The rows that stand for others.
        index_N: int32, which of them stands for each row, in [0, K).
        factor_N: Factor of that row, of the input's dtype; 0 leaves a row out.
    """

    row_KD: Tensor
    index_N: Tensor
    factor_N: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, index_K: Tensor, epsilon: float | None = None) -> Self:
        """Project each row of an input on the one of some of its rows that is nearest in direction, or in opposite
        direction.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            index_K: int64 numbers of the rows that stand for all, each at most once.
            epsilon: Leaves out rows whose distance to their projection is more than this share of their length, and
                multiplies the others by N over their number; None leaves out none.

        Returns:
            The projections.
        """
        import torch

        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        x = x_ND.to(dtype)
        row_KD = x.index_select(0, index_K)
        length_K = torch.linalg.vector_norm(row_KD, dim=1)
        one = length_K.new_ones(())
        direction_KD = row_KD / torch.where(length_K == 0.0, one, length_K)[:, None]
        along_NK = x @ direction_KD.t()
        index_N = along_NK.abs().argmax(1)
        along_N = along_NK.gather(1, index_N[:, None])[:, 0]  # the length of the projection, with its sign
        factor_N = along_N / torch.where(length_K == 0.0, one, length_K).index_select(0, index_N)
        if epsilon is not None:
            # By Pythagoras: the distance to the projection is what of the length is not along it.
            size_N = torch.linalg.vector_norm(x, dim=1)
            # 1e-6: a row that stands for itself is away from itself by rounding alone.
            is_near_N = size_N.square() - along_N.square() <= (epsilon * size_N).square() + 1e-6 * size_N.square()
            factor_N = factor_N * is_near_N * (len(x) / is_near_N.sum().clamp(min=1).to(dtype))
        shape = (x_ND.shape[0], x_ND.shape[1])
        return cls(shape, x_ND.index_select(0, index_K), index_N.to(torch.int32), factor_N.to(x_ND.dtype))

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, num_features: int, itemsize: int) -> int:
        """Return the bytes of so many rows that stand for ``num_rows``."""
        return num_kept * num_features * itemsize + num_rows * (_SMALL_INDEX_BYTES + itemsize)

    def restore(self) -> Tensor:
        return self.row_KD.index_select(0, self.index_N) * self.factor_N[:, None]
