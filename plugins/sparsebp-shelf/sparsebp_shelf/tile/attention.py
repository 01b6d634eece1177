"""Compute softmax attention with the model's own forward and a backward that skips tiles.

Shape letters: B examples, H heads, G heads of keys and values, T queries, S keys, D and E widths, Q and K tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from sparsebp_shelf.tile.gradient import count_tiles, masked_gradients, sum_tiles, tiled_gradients

Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, H, T, D), (B, G, S, D), (B, G, S, E) to (B, T, H, E)


class ChoosesTiles(Protocol):
    """Interface of the object that decides about tiles in a backward."""

    def size(self) -> int | None:
        """Return the queries and keys of a tile in the current backward; None if it is dense."""

    def choose(self, mass_HQK: Tensor, example: int) -> Tensor:
        """Return which tiles of an example are kept, given the sum of the attention weights in each."""

    @property
    def is_reference(self) -> bool:
        """Whether the backward multiplies masked matrices densely."""


@dataclass(frozen=True)
class Attention:
    """Options that define an attention's weights.

    Args:
        mask: Added to the scores, or bool: True where a query attends; (B or 1, H or 1, T, S). None: everything.
        is_causal: Whether query t attends only to the first t + 1 keys; only without a mask.
        scale: Factor of the products of queries and keys.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float

    def weights(self, query_HTD: Tensor, key_HSD: Tensor, example: int) -> tuple[Tensor, Tensor | None]:
        """Return the weights of an example, (H, T, S), zeros for a query that attends to nothing, and where the mask
        lets it attend, (1 or H, T, S), or None: everywhere."""
        score_HTS = (query_HTD @ key_HSD.mT).mul_(self.scale)
        allowed = self._allowed(score_HTS, example)
        if self.mask is not None and self.mask.dtype != torch.bool:
            score_HTS += self._of(example, score_HTS)
        elif allowed is not None:
            score_HTS.masked_fill_(~allowed, -torch.inf)
        return score_HTS.softmax(-1).nan_to_num_(0.0), allowed

    def _of(self, example: int, score_HTS: Tensor) -> Tensor:
        assert self.mask is not None
        return self.mask[example if len(self.mask) > 1 else 0][..., : score_HTS.shape[-1]]

    def _allowed(self, score_HTS: Tensor, example: int) -> Tensor | None:
        if self.mask is not None:
            mask = self._of(example, score_HTS)
            return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        if not self.is_causal:
            return None
        return torch.ones_like(score_HTS[:1], dtype=torch.bool).tril()


def attend(query: Tensor, key: Tensor, value: Tensor, attention: Attention, run: Run, tiles: ChoosesTiles) -> Tensor:
    """Return what ``run`` returns, with a backward that skips tiles.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, E).
        attention: Definition of the same attention.
        run: Computes the output.
        tiles: Decides in the backward.

    Returns:
        (B, T, H, E).
    """
    output: Tensor = _Tiled.apply(query, key, value, attention, run, tiles)  # type: ignore[no-untyped-call]
    return output


def attend_by_definition(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Return the output of an attention, (B, T, H, E), computed from its definition."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for example, (query_HTD, key_HSD, value_HSE) in enumerate(zip(*_widen(query, key, value), strict=True)):
        weight_HTS, _ = attention.weights(query_HTD, _repeat(key_HSD, groups), example)
        outputs.append((weight_HTS @ _repeat(value_HSE, groups)).transpose(0, 1))
    return torch.stack(outputs).to(query.dtype)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: Attention, run: Run, tiles: ChoosesTiles
    ) -> Tensor:
        output = run(query, key, value)
        ctx.save_for_backward(query, key, value, output)
        ctx.attention, ctx.tiles = attention, tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return *_differentiate(ctx, grad), None, None, None


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    query, key, value, output = ctx.saved_tensors
    attention, tiles = cast("Attention", ctx.attention), cast("ChoosesTiles", ctx.tiles)
    grads = tuple(torch.empty_like(part) for part in (query, key, value))
    groups, size = query.shape[1] // key.shape[1], tiles.size()
    wide = _widen(query, key, value, output.transpose(1, 2), grad.transpose(1, 2))
    for example, (query_HTD, key_HSD, value_HSE, output_HTE, grad_HTE) in enumerate(zip(*wide, strict=True)):
        rows = query_HTD, _repeat(key_HSD, groups), _repeat(value_HSE, groups), output_HTE
        weight_HTS, allowed = attention.weights(rows[0], rows[1], example)
        length = size or max(weight_HTS.shape[1:])  # all in one tile
        left_HQK = _find_left(weight_HTS, allowed, length)
        keep_HQK = left_HQK
        if size is not None:
            keep_HQK = left_HQK & tiles.choose(sum_tiles(weight_HTS, length), example)
        given = weight_HTS, grad_HTE, rows, keep_HQK, length, attention.scale
        if tiles.is_reference:
            found = masked_gradients(*given)
        else:
            found = tiled_gradients(*given, num_tiles=int(left_HQK.sum()))
        for whole, part in zip(grads, found, strict=True):
            whole[example] = part.unflatten(0, (len(whole[example]), -1)).sum(1)
    return grads


def _find_left(weight_HTS: Tensor, allowed: Tensor | None, size: int) -> Tensor:
    """Return the tiles in which the mask leaves any weight, (H, Q, K)."""
    num_heads, num_queries, num_keys = weight_HTS.shape
    tiles = count_tiles(size, num_queries), count_tiles(size, num_keys)
    if allowed is None:
        return torch.ones(num_heads, *tiles, dtype=torch.bool, device=weight_HTS.device)
    padded = pad(allowed, (0, tiles[1] * size - num_keys, 0, tiles[0] * size - num_queries))
    left = padded.view(-1, tiles[0], size, tiles[1], size).any(4).any(2)
    return left.expand(num_heads, -1, -1)


def _widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def _repeat(rows_GSD: Tensor, groups: int) -> Tensor:
    return rows_GSD if groups == 1 else rows_GSD.repeat_interleave(groups, 0)
