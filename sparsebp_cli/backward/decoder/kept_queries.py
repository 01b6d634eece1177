"""Some queries of every example in a batch, in chunks.

Shape letters: B examples, T positions, N rows (= B*T), H heads, D width, K kept queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptQueries:
    """The same number of queries of every example. Examples with fewer are padded with their first position.

    Args:
        index_BK: Row indices in N.
        place_R: Positions of the rows in the flat ``index_BK``, int64; None: no padding.
    """

    index_BK: Tensor
    place_R: Tensor | None = None

    @classmethod
    def of(cls, index_R: Tensor, num_examples: int, num_positions: int) -> KeptQueries:
        """Return the queries for sorted row indices; synchronises with the device."""
        example_R = index_R // num_positions
        count_B = torch.bincount(example_R, minlength=num_examples)
        most = int(count_B.max())
        if most * num_examples == len(index_R):
            return cls(index_R.view(num_examples, most))
        start_B = count_B.cumsum(0) - count_B
        place_R = example_R * most + torch.arange(len(index_R), device=index_R.device) - start_B[example_R]
        first_B = torch.arange(num_examples, device=index_R.device) * num_positions
        index_K = first_B.repeat_interleave(most).index_copy(0, place_R, index_R)
        return cls(index_K.view(num_examples, most), place_R)

    def positions(self, num_positions: int) -> Tensor:
        """Return the position of each query in its example, (B, K)."""
        example_B1 = torch.arange(len(self.index_BK), device=self.index_BK.device)[:, None]
        return self.index_BK - example_B1 * num_positions

    def spread(self, rows_RD: Tensor) -> Tensor:
        """Return the values of the rows at their queries, (B, K, D), zeros where padded."""
        num_examples, most = self.index_BK.shape
        if self.place_R is not None:
            padded = rows_RD.new_zeros(num_examples * most, rows_RD.shape[1])
            rows_RD = padded.index_copy_(0, self.place_R, rows_RD)
        return rows_RD.view(num_examples, most, rows_RD.shape[1])


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries, which attend only to the first keys."""

    queries: slice
    num_keys: int


def cut(position_BK: Tensor, size: int) -> list[Chunk]:
    """Return chunks of about ``size`` queries of a causal attention."""
    num_queries = position_BK.shape[1]
    size = -(-num_queries // max(1, num_queries // size))  # equal chunks, without a small last one
    starts = range(0, num_queries, size)
    return [Chunk(slice(i, i + size), int(position_BK[:, i : i + size].max()) + 1) for i in starts]


def add_prefixes(gradients: Sequence[tuple[int, Tensor]], num_positions: int) -> Tensor:
    """Return the sum, (B, H, T, D), of gradients that cover the first positions, each with its number of positions."""
    (longest, first), *others = sorted(gradients, key=lambda part: -part[0])
    num_examples, num_heads, _, width = first.shape
    total = first.new_empty(num_examples, num_positions, num_heads, width).transpose(1, 2)
    total[:, :, :longest].copy_(first)
    total[:, :, longest:].zero_()
    for end, grad in others:
        total[:, :, :end].add_(grad)
    return total
