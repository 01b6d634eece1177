"""Random projections of a linear's input, whose matrix is drawn again from its seed and never stored.

Shape letters: N rows (= B*T), D input width, K kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal, Self, final

from sparsebp_cli.policy.saved import Saved

if TYPE_CHECKING:
    from torch import Generator, Tensor


@final
@dataclass(frozen=True)
class SavedSketch(Saved):
    """A random projection of the rows, ``z = S^T x``, which stands for ``S z``. ``S`` is drawn again, never stored.

    Args:
        sketch_KD: The projection ``z``, K rows in place of N.
        seed: Seed of the generator that draws ``S`` (N, K), of independent entries with mean 0 and variance 1/K.
        entries: Whether these are of the normal distribution, or +1 and -1 over the root of K.
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
            generator: Fresh, from ``step.generator(site, x_ND.device)``: its seed draws the same matrix again.
            entries: Distribution of the matrix's entries: normal, or +1 and -1 over the root of K.

        Returns:
            The projection.
        """
        empty = cls((x_ND.shape[0], x_ND.shape[1]), x_ND.new_empty(num_kept, 0), generator.initial_seed(), entries)
        return cls(empty.shape, empty.draw().t() @ x_ND, empty.seed, entries)

    @staticmethod
    def count_bytes(num_kept: int, num_features: int, itemsize: int) -> int:
        """Return the bytes of a projection on so many rows."""
        return num_kept * num_features * itemsize

    def draw(self) -> Tensor:
        """Return the matrix ``S``, (N, K), the same each time."""
        return _draw_matrix(self.sketch_KD, (self.shape[0], self.sketch_KD.shape[0]), self.seed, self.entries)

    def restore(self) -> Tensor:
        return self.draw() @ self.sketch_KD


@final
@dataclass(frozen=True)
class SavedProjection(Saved):
    """A random projection of the features, ``z = x P``, which stands for ``z P^T``. ``P`` is drawn again, never stored.

    Args:
        projection_NK: The projection ``z``, K features in place of D.
        seed: Seed of the generator that draws ``P`` (D, K), of independent entries with mean 0 and variance 1/K.
        entries: Whether these are of the normal distribution, or +1 and -1 over the root of K.
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
            generator: Fresh, from ``step.generator(site, x_ND.device)``: its seed draws the same matrix again.
            entries: Distribution of the matrix's entries: normal, or +1 and -1 over the root of K.

        Returns:
            The projection.
        """
        empty = cls((x_ND.shape[0], x_ND.shape[1]), x_ND.new_empty(0, num_kept), generator.initial_seed(), entries)
        return cls(empty.shape, x_ND @ empty.draw(), empty.seed, entries)

    @staticmethod
    def count_bytes(num_kept: int, num_rows: int, itemsize: int) -> int:
        """Return the bytes of a projection on so many features."""
        return num_kept * num_rows * itemsize

    def forget(self) -> SavedProjection:
        """Return what draws the same matrix, without the projection."""
        # A copy: a view of no rows would keep all of them in memory.
        return SavedProjection(self.shape, self.projection_NK[:0].clone(), self.seed, self.entries)

    def draw(self) -> Tensor:
        """Return the matrix ``P``, (D, K), the same each time."""
        return _draw_matrix(self.projection_NK, (self.shape[1], self.projection_NK.shape[1]), self.seed, self.entries)

    def restore(self) -> Tensor:
        return self.projection_NK @ self.draw().t()


def _draw_matrix(like: Tensor, size: tuple[int, int], seed: int, entries: Literal["gaussian", "rademacher"]) -> Tensor:
    """Draw independent entries with mean 0 and variance 1 over the second number of the size."""
    import torch

    generator = torch.Generator(like.device).manual_seed(seed)
    if entries == "gaussian":
        drawn = torch.randn(size, generator=generator, device=like.device)
    else:
        drawn = torch.randint(0, 2, size, generator=generator, device=like.device).float() * 2.0 - 1.0
    return (drawn / sqrt(size[1])).to(like.dtype)
