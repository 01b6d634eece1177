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
        seed: Seed of the generator that draws ``P`` (D, K), of independent normal entries with mean 0 and variance 1/K.
    """

    projection_NK: Tensor
    seed: int

    @classmethod
    def of(cls, x_ND: Tensor, num_kept: int, generator: Generator) -> Self:
        """Project the features of an input on fewer.

        Args:
            x_ND: Input of a linear, all leading dimensions flattened to N rows.
            num_kept: K, at least 1.
            generator: A new one, from ``step.generator(site, x_ND.device)``: its seed draws the same matrix again.

        Returns:
            The projection.
        """
        empty = cls((x_ND.shape[0], x_ND.shape[1]), x_ND.new_empty(0, num_kept), generator.initial_seed())
        return cls(empty.shape, x_ND @ empty.draw(), empty.seed)

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of a projection on ``num_kept`` features."""
        return num_kept * num_rows * itemsize

    def forget(self) -> SavedProjection:
        """Return a copy that draws the same matrix, without the projection."""
        # A clone: an empty view would keep the whole projection in memory.
        return SavedProjection(self.shape, self.projection_NK[:0].clone(), self.seed)

    def draw(self) -> Tensor:
        """Return the matrix ``P``, (D, K), the same each time."""
        return _draw_matrix(self.projection_NK, (self.shape[1], self.projection_NK.shape[1]), self.seed, "gaussian")

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
