"""Skipped tiles of attention, by hand: the equations, entry by entry of the table of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_shelf.tile import AttentionTiles, TileSelector

NAME = "torch.nn.functional.scaled_dot_product_attention"


@contextmanager
def tiling_by_hand(policy: TileSelector, step: Step) -> Iterator[list[Tensor]]:
    """Let every attention of two dimensions of keys have the backward that a policy leaves.

    Args:
        policy: Draws nothing: the names of modules are not known here.
        step: The step of the forward and backward.

    Yields:
        The choices, (H, Q, K) each, as they are made.
    """
    choices: list[Tensor] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **given: Any
    ) -> Tensor:
        assert dropout_p == 0.0
        mask = attn_mask
        if given.get("is_causal"):
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
        output: Tensor = _ByHand.apply(query, key, value, mask, scale, (own, policy, step, choices))  # type: ignore[no-untyped-call]
        return output

    with patch(NAME, attend):
        yield choices


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, given: Any
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale, ctx.given = mask, scale, given
        output: Tensor = given[0](query, key, value, attn_mask=mask, scale=scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, (_, policy, step, choices) = ctx.saved_tensors, ctx.given  # checkpointing unpacks them once
        dtypes = [part.dtype for part in saved]
        query, key, value, grad = (part.double() for part in (*saved, grad))
        score = ctx.scale * query @ key.mT
        if ctx.mask is not None and ctx.mask.dtype == torch.bool:
            score = score.masked_fill(~ctx.mask, -torch.inf)
        elif ctx.mask is not None:
            score = score + ctx.mask
        weight = score.softmax(-1).nan_to_num(0.0)  # of a query that attends to nothing
        size, (num_queries, num_keys) = policy.tile_size, weight.shape[2:]
        rows, columns = range(0, num_queries, size), range(0, num_keys, size)
        kept = torch.zeros_like(weight)
        for example in range(len(query)):
            mass = torch.stack(
                [
                    torch.stack([weight[example, :, i : i + size, j : j + size].sum((1, 2)) for j in columns], 1)
                    for i in rows
                ],
                1,
            )
            choice = policy.at(step).select(mass, AttentionTiles("by hand", None, example), step)
            choices.append(choice)
            for head, i, j in torch.nonzero(choice).tolist():
                tile = (example, head, slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
                kept[tile] = weight[tile]
        subtracted = (weight * (grad @ value.mT)).sum(-1, keepdim=True)
        of_score = ctx.scale * kept * (grad @ value.mT - subtracted)
        grads = of_score @ key, of_score.mT @ query, kept.mT @ grad
        return *(part.to(dtype) for part, dtype in zip(grads, dtypes, strict=True)), None, None, None
