"""Compute the gradients of softmax attention without some of its tiles.

With the weights P = softmax(s Q K' + mask), the output O = P V and its gradient dO,

    dV = P' dO,   dS = s P * (dO V' - sum over columns of dO * O),   dQ = dS K,   dK = dS' Q,

where P and dS count as zero in a skipped tile. O comes from the forward, so its sum covers all keys.

Shape letters: H heads, T queries, S keys, D width of queries and keys, E width of values, Q tiles of queries, K tiles
of keys, P kept tiles, L queries or keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values
Rows: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # Q, K, V and O


def count_tiles(size: int, num_rows: int) -> int:
    """Return the number of tiles of ``size`` that cover ``num_rows`` queries or keys."""
    return -(-num_rows // size)


def sum_tiles(values_HTS: Tensor, size: int) -> Tensor:
    """Return the sum of each tile, (H, Q, K)."""
    num_heads, num_queries, num_keys = values_HTS.shape
    tiles = count_tiles(size, num_queries), count_tiles(size, num_keys)
    padded = pad(values_HTS, (0, tiles[1] * size - num_keys, 0, tiles[0] * size - num_queries))
    return padded.view(num_heads, tiles[0], size, tiles[1], size).sum((2, 4))


def masked_gradients(
    weight_HTS: Tensor, grad_HTE: Tensor, rows: Rows, keep_HQK: Tensor, size: int, scale: float
) -> Gradients:
    """Return the gradients by dense products of masked matrices: the reference.

    Args:
        weight_HTS: Attention weights P.
        grad_HTE: Gradient of the output, dO.
        rows: Q (H, T, D), K (H, S, D), V (H, S, E) and O (H, T, E).
        keep_HQK: Whether each tile counts, bool.
        size: Queries and keys of a tile.
        scale: Factor s of the products of queries and keys.

    Returns:
        dQ, dK and dV.
    """
    query_HTD, key_HSD, value_HSE, output_HTE = rows
    num_queries, num_keys = weight_HTS.shape[1:]
    keep_HTS = keep_HQK.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :num_queries, :num_keys]
    kept_HTS = weight_HTS * keep_HTS
    sum_HT1 = (grad_HTE * output_HTE).sum(-1, keepdim=True)
    score_HTS = scale * kept_HTS * (grad_HTE @ value_HSE.mT - sum_HT1)
    return score_HTS @ key_HSD, score_HTS.mT @ query_HTD, kept_HTS.mT @ grad_HTE


def tiled_gradients(
    weight_HTS: Tensor,
    grad_HTE: Tensor,
    rows: Rows,
    keep_HQK: Tensor,
    size: int,
    scale: float,
    *,
    num_tiles: int,
) -> Gradients:
    """Return the gradients by products of the kept tiles only; see :func:`masked_gradients`.

    Args:
        weight_HTS: Attention weights P.
        grad_HTE: Gradient of the output, dO.
        rows: Q, K, V and O.
        keep_HQK: Whether each tile counts, bool.
        size: Queries and keys of a tile.
        scale: Factor s of the products of queries and keys.
        num_tiles: Tiles that the mask leaves; FLOPs count the kept tiles as a fraction of them.

    Returns:
        dQ, dK and dV.
    """
    result: Gradients = _gather_tiles(weight_HTS, grad_HTE, *rows, keep_HQK, size, scale, num_tiles)
    return result


@torch.library.custom_op("sparsebp::tile_gradients", mutates_args=())
def _gather_tiles(  # noqa: PLR0913, PLR0917 - an operator takes tensors and numbers alone
    weight_HTS: Tensor,
    grad_HTE: Tensor,
    query_HTD: Tensor,
    key_HSD: Tensor,
    value_HSE: Tensor,
    output_HTE: Tensor,
    keep_HQK: Tensor,
    size: int,
    scale: float,
    num_tiles: int,  # noqa: ARG001 - read by the formula of the FLOPs
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_queries, num_keys = weight_HTS.shape
    tiles_Q, tiles_K = keep_HQK.shape[1:]
    head_P, query_P, key_P = keep_HQK.nonzero(as_tuple=True)
    padded = pad(weight_HTS, (0, tiles_K * size - num_keys, 0, tiles_Q * size - num_queries))
    weight_PLL = padded.view(num_heads, tiles_Q, size, tiles_K, size)[head_P, query_P, :, key_P]
    cut = _Cut(size)
    grad_PLE = cut.take(grad_HTE, head_P, query_P)
    sum_HT1 = (grad_HTE * output_HTE).sum(-1, keepdim=True)
    score_PLL = torch.bmm(grad_PLE, cut.take(value_HSE, head_P, key_P).mT)
    score_PLL.sub_(cut.take(sum_HT1, head_P, query_P)).mul_(weight_PLL).mul_(scale)
    return (
        cut.add(torch.bmm(score_PLL, cut.take(key_HSD, head_P, key_P)), query_HTD, head_P, query_P),
        cut.add(torch.bmm(score_PLL.mT, cut.take(query_HTD, head_P, query_P)), key_HSD, head_P, key_P),
        cut.add(torch.bmm(weight_PLL.mT, grad_PLE), value_HSE, head_P, key_P),
    )


class _Cut:
    """Rows cut into tiles."""

    def __init__(self, size: int) -> None:
        self._size = size

    def take(self, rows_HTD: Tensor, head_P: Tensor, tile_P: Tensor) -> Tensor:
        """Return the rows of some tiles, (P, L, D), zeros after the last row."""
        num_tiles = count_tiles(self._size, rows_HTD.shape[1])
        padded = pad(rows_HTD, (0, 0, 0, num_tiles * self._size - rows_HTD.shape[1]))
        return padded.reshape(-1, self._size, rows_HTD.shape[2])[head_P * num_tiles + tile_P]

    def add(self, rows_PLD: Tensor, like_HTD: Tensor, head_P: Tensor, tile_P: Tensor) -> Tensor:
        """Return the sums of tiles at their places, in the shape of ``like_HTD``."""
        num_heads, num_rows, width = like_HTD.shape
        num_tiles = count_tiles(self._size, num_rows)
        total = rows_PLD.new_zeros(num_heads * num_tiles, self._size, width)
        total.index_add_(0, head_P * num_tiles + tile_P, rows_PLD)
        return total.view(num_heads, num_tiles * self._size, width)[:, :num_rows].contiguous()


@_gather_tiles.register_fake
def _(
    weight_HTS: Tensor,  # noqa: ARG001 - the operator's signature
    grad_HTE: Tensor,  # noqa: ARG001
    query_HTD: Tensor,
    key_HSD: Tensor,
    value_HSE: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_HTD), torch.empty_like(key_HSD), torch.empty_like(value_HSE)


def _count(weight_HTS: Tensor, grad_HTE: Tensor, query_HTD: Tensor, *rest: object, **_: object) -> int:
    """Return the FLOPs of four products, scaled by the kept fraction of the tiles that the mask leaves. As for a dense
    attention backward, the whole square counts, causal or not."""
    keep_HQK, num_tiles = rest[3], rest[6]
    assert isinstance(keep_HQK, Tensor)
    assert isinstance(num_tiles, int)
    whole = 4 * weight_HTS.numel() * (query_HTD.shape[-1] + grad_HTE.shape[-1])
    return round(whole * int(keep_HQK.sum()) / max(1, num_tiles))


_formula: Callable[..., int] = register_flop_formula(torch.ops.sparsebp.tile_gradients, get_raw=True)(_count)
