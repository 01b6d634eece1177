"""Store compressed forms of a linear's input, for policies that save less of it.

Shape letters: N rows (= B*T), D input width, O output width, K kept, G groups, C features of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal, Self, final

from typing_extensions import override

from sparsebp_cli.policy import Saved, choice

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from sparsebp_cli.policy import WeightProduct

INDEX_BYTES = 8  # bytes of a row number
_SMALL_INDEX_BYTES, _SMALL_INDEX = 4, 2**31  # bytes of an entry number, below so many entries


def _keep(budget: float, number: int) -> float:
    """Return the fraction of ``number`` rows or features that is kept, at least one of them."""
    return choice.count_kept(budget, number) / max(1, number)


@final
@dataclass(frozen=True)
class SavedRows(Saved):
    """Rows, multiplied by their weights; all others are zero.

    Args:
        row_KD: The kept rows, times their weights.
        index_K: int64 row numbers, on the input's device; a number that occurs twice gets the sum of both rows.
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
        """Return the bytes of ``num_kept`` rows."""
        return num_kept * (num_features * itemsize + INDEX_BYTES)

    @classmethod
    @override
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:
        return _keep(budget, num_rows)

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.row_KD.shape[0], self.shape[0]

    @override
    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        return form.wgrad(grad_NO.index_select(0, self.index_K), self.row_KD)

    def restore(self) -> Tensor:
        return self.row_KD.new_zeros(self.shape).index_add_(0, self.index_K, self.row_KD)


@final
@dataclass(frozen=True)
class SavedElements(Saved):
    """Single entries; all others are zero.

    Args:
        value_K: The kept entries, of the input's dtype.
        index_K: Their numbers, counted row by row (row * D + feature), each at most once, on the input's device: int32
            if they fit, else int64.
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
        """Return the bytes of ``num_kept`` entries out of ``num_entries``."""
        return num_kept * (itemsize + (_SMALL_INDEX_BYTES if num_entries < _SMALL_INDEX else INDEX_BYTES))

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.value_K.numel(), self.shape[0] * self.shape[1]

    def restore(self) -> Tensor:
        flat = self.value_K.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy_(0, self.index_K.long(), self.value_K).view(self.shape)


@final
@dataclass(frozen=True)
class SavedDirection(Saved):
    """One number for each group of neighbouring features of a row: its projection on a direction that all groups share.

    Args:
        along_NG: Factor of the direction in each of a row's G groups, of the input's dtype.
        direction_C: The direction, of length 1; the last group may have fewer features.
    """

    along_NG: Tensor
    direction_C: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, direction_C: Tensor) -> Self:
        """Project each group of neighbouring features on a direction.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            direction_C: The direction, of length 1, float32 or wider, with as many features as a group.

        Returns:
            The projections.
        """
        along_NG = _split_features(x_ND, len(direction_C)).to(direction_C.dtype) @ direction_C
        return cls((x_ND.shape[0], x_ND.shape[1]), along_NG.to(x_ND.dtype), direction_C.to(x_ND.dtype))

    @staticmethod
    def mean_direction(x_ND: Tensor, size: int) -> Tensor:
        """Return the mean of all groups of ``size`` features, scaled to the length 1, float32 or wider; for a mean of
        zero, the direction of equal entries."""
        import torch

        mean_C = _split_features(x_ND, size).to(torch.promote_types(x_ND.dtype, torch.float32)).flatten(0, 1).mean(0)
        length = torch.linalg.vector_norm(mean_C)
        return torch.where(length == 0.0, size**-0.5, mean_C / torch.where(length == 0.0, 1.0, length))

    @staticmethod
    def count_bytes(num_groups: int, size: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of ``num_groups`` groups of ``size`` features in each row."""
        return (num_groups * num_rows + size) * itemsize

    @classmethod
    @override
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:
        return _keep(budget, num_features)

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.along_NG.shape[1], self.shape[1]

    @override
    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        product, num_features = form.wgrad(grad_NO, self.along_NG), self.shape[1]
        if form.output_dim == 0:
            return (product[:, :, None] * self.direction_C).flatten(1)[:, :num_features]
        return (product[:, None, :] * self.direction_C[:, None]).flatten(0, 1)[:num_features]

    def restore(self) -> Tensor:
        return (self.along_NG[:, :, None] * self.direction_C).flatten(1)[:, : self.shape[1]]


def _split_features(x_ND: Tensor, size: int) -> Tensor:
    """Return the groups of ``size`` neighbouring features, (N, G, size), the last one padded with zeros."""
    from torch.nn.functional import pad

    return pad(x_ND, (0, -x_ND.shape[1] % size)).reshape(x_ND.shape[0], -1, size)


@final
@dataclass(frozen=True)
class SavedRepresentatives(Saved):
    """A few representative rows; every row of the input becomes a multiple of one of them.

    Args:
        row_KD: The representative rows.
        index_N: int32, the representative of each row, in [0, K).
        factor_N: Factor of that representative, of the input's dtype; 0 leaves a row out.
    """

    row_KD: Tensor
    index_N: Tensor
    factor_N: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, index_K: Tensor, epsilon: float | None = None) -> Self:
        """Project each row on the representative that is nearest in direction, or in opposite direction.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            index_K: int64 numbers of the representative rows, each at most once.
            epsilon: Leaves out rows whose distance to their projection exceeds this fraction of their length, and
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
        along_N = along_NK.gather(1, index_N[:, None])[:, 0]  # signed length of the projection
        factor_N = along_N / torch.where(length_K == 0.0, one, length_K).index_select(0, index_N)
        if epsilon is not None:
            # By Pythagoras, the squared distance is the squared length minus the squared projection.
            size_N = torch.linalg.vector_norm(x, dim=1)
            # 1e-6 allows for rounding: a representative has the distance 0 to itself.
            is_near_N = size_N.square() - along_N.square() <= (epsilon * size_N).square() + 1e-6 * size_N.square()
            factor_N = factor_N * is_near_N * (len(x) / is_near_N.sum().clamp(min=1).to(dtype))
        shape = (x_ND.shape[0], x_ND.shape[1])
        return cls(shape, x_ND.index_select(0, index_K), index_N.to(torch.int32), factor_N.to(x_ND.dtype))

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, num_features: int, itemsize: int) -> int:
        """Return the bytes of ``num_kept`` rows that represent ``num_rows``."""
        return num_kept * num_features * itemsize + num_rows * (_SMALL_INDEX_BYTES + itemsize)

    @classmethod
    @override
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:
        return _keep(budget, num_rows)

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.row_KD.shape[0], self.shape[0]

    @override
    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        # Sum the gradients of the rows of one representative before multiplying, in float32 or wider.
        import torch

        dtype = torch.promote_types(grad_NO.dtype, torch.float32)
        weighted_NO = grad_NO.to(dtype) * self.factor_N.to(dtype)[:, None]
        sum_KO = weighted_NO.new_zeros(len(self.row_KD), grad_NO.shape[1]).index_add_(0, self.index_N, weighted_NO)
        return form.wgrad(sum_KO.to(grad_NO.dtype), self.row_KD)

    def restore(self) -> Tensor:
        return self.row_KD.index_select(0, self.index_N) * self.factor_N[:, None]


@final
@dataclass(frozen=True)
class SavedSketch(Saved):
    """A random projection of the rows, ``z = S^T x``, which represents ``S z``. ``S`` is drawn again, never stored.

    Args:
        sketch_KD: The projection ``z``, K rows instead of N.
        seed: Seed of the generator that draws ``S`` (N, K), of independent entries with mean 0 and variance 1/K.
        entries: Distribution of ``S``: normal, or +1 and -1 over the root of K.
    """

    sketch_KD: Tensor
    seed: int
    entries: Literal["gaussian", "rademacher"]

    @classmethod
    def of(cls, x_ND: Tensor, num_kept: int, generator: Generator, entries: Literal["gaussian", "rademacher"]) -> Self:
        """Project the rows of an input on fewer.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            num_kept: K, at least 1.
            generator: A new one, from ``step.generator(site, x_ND.device)``: its seed draws the same matrix again.
            entries: Distribution of the matrix's entries: normal, or +1 and -1 over the root of K.

        Returns:
            The projection.
        """
        empty = cls((x_ND.shape[0], x_ND.shape[1]), x_ND.new_empty(num_kept, 0), generator.initial_seed(), entries)
        return cls(empty.shape, empty.draw().t() @ x_ND, empty.seed, entries)

    @staticmethod
    def count_bytes(num_kept: int, num_features: int, itemsize: int) -> int:
        """Return the bytes of a projection on ``num_kept`` rows."""
        return num_kept * num_features * itemsize

    def draw(self) -> Tensor:
        """Return the matrix ``S``, (N, K), the same each time."""
        return _draw_matrix(self.sketch_KD, (self.shape[0], self.sketch_KD.shape[0]), self.seed, self.entries)

    @classmethod
    @override
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:
        # The backward projects the gradient too: N K O + K D O multiplications instead of N D O.
        return _keep(budget, num_rows) + choice.count_kept(budget, num_rows) / num_features

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.sketch_KD.shape[0], self.shape[0]

    @override
    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        return form.wgrad(self.draw().t() @ grad_NO, self.sketch_KD)

    def restore(self) -> Tensor:
        return self.draw() @ self.sketch_KD


@final
@dataclass(frozen=True)
class SavedProjection(Saved):
    """A random projection of the features, ``z = x P``, which represents ``z P^T``. ``P`` is drawn again, never stored.

    Args:
        projection_NK: The projection ``z``, K features instead of D.
        seed: Seed of the generator that draws ``P`` (D, K), of independent entries with mean 0 and variance 1/K.
        entries: Distribution of ``P``: normal, or +1 and -1 over the root of K.
    """

    projection_NK: Tensor
    seed: int
    entries: Literal["gaussian", "rademacher"]

    @classmethod
    def of(cls, x_ND: Tensor, num_kept: int, generator: Generator, entries: Literal["gaussian", "rademacher"]) -> Self:
        """Project the features of an input on fewer.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            num_kept: K, at least 1.
            generator: A new one, from ``step.generator(site, x_ND.device)``: its seed draws the same matrix again.
            entries: Distribution of the matrix's entries: normal, or +1 and -1 over the root of K.

        Returns:
            The projection.
        """
        empty = cls((x_ND.shape[0], x_ND.shape[1]), x_ND.new_empty(0, num_kept), generator.initial_seed(), entries)
        return cls(empty.shape, x_ND @ empty.draw(), empty.seed, entries)

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of a projection on ``num_kept`` features."""
        return num_kept * num_rows * itemsize

    def forget(self) -> SavedProjection:
        """Return a copy that draws the same matrix, without the projection."""
        # A clone: an empty view would keep the whole projection in memory.
        return SavedProjection(self.shape, self.projection_NK[:0].clone(), self.seed, self.entries)

    def draw(self) -> Tensor:
        """Return the matrix ``P``, (D, K), the same each time."""
        return _draw_matrix(self.projection_NK, (self.shape[1], self.projection_NK.shape[1]), self.seed, self.entries)

    @classmethod
    @override
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:
        # N K O multiplications, then O K D to project the product back.
        return _keep(budget, num_features) + choice.count_kept(budget, num_features) / num_rows

    @property
    @override
    def units(self) -> tuple[int, int]:
        return self.projection_NK.shape[1], self.shape[1]

    @override
    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        product, matrix_DK = form.wgrad(grad_NO, self.projection_NK), self.draw()
        return product @ matrix_DK.t() if form.output_dim == 0 else matrix_DK @ product

    def restore(self) -> Tensor:
        return self.projection_NK @ self.draw().t()


def _draw_matrix(like: Tensor, size: tuple[int, int], seed: int, entries: Literal["gaussian", "rademacher"]) -> Tensor:
    """Return independent entries with mean 0 and variance 1 / ``size[1]``."""
    import torch

    generator = torch.Generator(like.device).manual_seed(seed)
    if entries == "gaussian":
        drawn = torch.randn(size, generator=generator, device=like.device)
    else:
        drawn = torch.randint(0, 2, size, generator=generator, device=like.device).float() * 2.0 - 1.0
    return (drawn / sqrt(size[1])).to(like.dtype)
