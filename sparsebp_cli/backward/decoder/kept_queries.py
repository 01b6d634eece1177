"""Some queries of every example in a batch, and attention of them in chunks.

Shape letters: B examples, T positions, N rows (= B*T), H heads, D width, K kept queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override


@dataclass(frozen=True)
class KeptQueries:
    """Queries of every example, as many of each: examples with fewer are padded with their first position.

    Args:
        index_BK: Row numbers in N.
        place_R: Places of the rows in the flat ``index_BK``, int64; None: there is no padding.
    """

    index_BK: Tensor
    place_R: Tensor | None = None

    @classmethod
    def of(cls, index_R: Tensor, num_examples: int, num_positions: int) -> KeptQueries:
        """Return the queries of sorted row numbers; synchronises with the device."""
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
    """Queries that follow each other, none of which looks beyond the first keys."""

    queries: slice
    num_keys: int


def cut(position_BK: Tensor, size: int) -> list[Chunk]:
    """Return chunks of about so many queries, of an attention in which a query attends to no later position."""
    num_queries = position_BK.shape[1]
    size = -(-num_queries // max(1, num_queries // size))  # equal ones, and none of a few queries that are left over
    starts = range(0, num_queries, size)
    return [Chunk(slice(i, i + size), int(position_BK[:, i : i + size].max()) + 1) for i in starts]


@final
class ChunkedAttention(TorchFunctionMode):
    """Runs PyTorch's attention of some queries with a causal mask in chunks, so that early queries skip later keys."""

    def __init__(self, position_BK: Tensor, size: int) -> None:
        super().__init__()
        self._chunks, self._num_queries = cut(position_BK, size), position_BK.shape[1]

    @override
    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        attend = self._attend if function is scaled_dot_product_attention else function
        return attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        ends, num_keys = [chunk.num_keys for chunk in self._chunks], key.shape[-2]
        # Not the attention of these queries, or no key that could be left out.
        if attn_mask is None or query.dim() != 4 or attn_mask.shape[-1] != num_keys or ends == [num_keys]:
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        if len(ends) > 1 and not self._num_queries == query.shape[2] == attn_mask.shape[-2]:
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        keys, values = _Prefixes.apply(key, ends), _Prefixes.apply(value, ends)  # type: ignore[no-untyped-call]
        if len(ends) == 1:
            return scaled_dot_product_attention(query, keys[0], values[0], attn_mask[..., : ends[0]], *args, **kwargs)
        sizes = [len(range(*chunk.queries.indices(self._num_queries))) for chunk in self._chunks]
        outputs = [
            scaled_dot_product_attention(q, k, v, mask[..., :end], *args, **kwargs).transpose(1, 2)
            for q, k, v, mask, end in zip(
                query.split(sizes, 2), keys, values, attn_mask.split(sizes, -2), ends, strict=True
            )
        ]
        return torch.cat(outputs, 1).transpose(1, 2)  # lies in memory as the output of one attention does


@final
class _Prefixes(Function):
    """The first positions of keys or values, (B, H, T, D), once for each chunk of queries.

    Autograd itself would lengthen the gradient of each chunk to all positions and add these.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.ends = x.shape, ends
        return tuple(x[:, :, :end] for end in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        given = [(end, grad) for end, grad in zip(ctx.ends, gradients, strict=True) if grad is not None]
        return add_prefixes(given, ctx.shape[2]) if given else None, None


def add_prefixes(gradients: Sequence[tuple[int, Tensor]], num_positions: int) -> Tensor:
    """Return the sum of gradients of the first positions, (B, H, T, D), each with the number of its positions."""
    (longest, first), *others = sorted(gradients, key=lambda part: -part[0])
    num_examples, num_heads, _, width = first.shape
    total = first.new_empty(num_examples, num_positions, num_heads, width).transpose(1, 2)
    total[:, :, :longest].copy_(first)
    total[:, :, longest:].zero_()
    for end, grad in others:
        total[:, :, :end].add_(grad)
    return total
