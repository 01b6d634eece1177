"""Padding of segments' rows to one length and its inverse, with backwards that copy rows instead of summing them.

The gradient of a padded row is zero (see ``groups.py``), so each row's gradient comes from one place.

Shape letters: R rows of a group, S places in it, including padding.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebp_cli.backward.kind.packing.groups import Padding


def with_padding(rows: Tensor, padding: Padding) -> Tensor:
    """Return rows (R, ...) as (S, ...)."""
    return cast("Tensor", _WithPadding.apply(rows, padding.row_S, padding.place_R))  # type: ignore[no-untyped-call]


def without_padding(places: Tensor, padding: Padding) -> Tensor:
    """Return places (S, ...) as rows (R, ...)."""
    return cast("Tensor", _WithoutPadding.apply(places, padding.place_R))  # type: ignore[no-untyped-call]


class _WithPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_S: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        return rows.index_select(0, row_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return grad.index_select(0, place_R), None, None


class _WithoutPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.size = places.shape
        return places.index_select(0, place_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place_R,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size).index_copy_(0, place_R, grad), None
