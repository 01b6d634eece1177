"""The gradient of a linear's weight from what a policy saved of the input, and its share of the dense product.

Each form with a fast kernel multiplies what was kept; the others are restored, and multiplied densely. The reference
restores every form.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsebp_cli.policy import (
    Saved,
    SavedColumns,
    SavedDirection,
    SavedProjection,
    SavedRepresentatives,
    SavedRows,
    SavedSketch,
    choice,
)


class WeightProduct(Protocol):
    """How a linear's weight lies."""

    output_dim: int

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        """Return the weight's gradient in the layout of the weight."""


def multiply_saved(form: WeightProduct, grad_NO: Tensor, saved: Saved, *, reference: bool) -> Tensor:
    """Return the weight's gradient of an output's gradient and what was saved of the input."""
    kernel = None if reference else _KERNELS.get(type(saved))
    return form.wgrad(grad_NO, saved.restore()) if kernel is None else kernel(form, grad_NO, saved)


def find_share(form: type[Saved] | None, budget: float, num_rows: int, num_features: int) -> float:
    """Return the multiplications of the weight's gradient over the dense ones; more than 1 where a sketch costs more.

    ``budget`` is what the policy declares, in (0, 1], and at least one row or feature is kept.
    """
    rows, features = (choice.count_kept(budget, number) / max(1, number) for number in (num_rows, num_features))
    if form in (SavedRows, SavedRepresentatives):
        return rows
    if form in (SavedColumns, SavedDirection):
        return features
    if form is SavedSketch:  # the gradient is projected too: N K O beside K D O, of N D O
        return rows + choice.count_kept(budget, num_rows) / num_features
    if form is SavedProjection:  # N K O, and the product is projected back: O K D
        return features + choice.count_kept(budget, num_features) / num_rows
    return 1.0


def _rows(form: WeightProduct, grad_NO: Tensor, saved: SavedRows) -> Tensor:
    return form.wgrad(grad_NO.index_select(0, saved.index_K), saved.row_KD)


def _columns(form: WeightProduct, grad_NO: Tensor, saved: SavedColumns) -> Tensor:
    product = form.wgrad(grad_NO, saved.column_NK)  # (O, K) or (K, O), as the weight lies
    shape, input_dim = list(product.shape), 1 - form.output_dim
    shape[input_dim] = saved.shape[1]
    return product.new_zeros(shape).index_copy_(input_dim, saved.index_K, product)


def _sketch(form: WeightProduct, grad_NO: Tensor, saved: SavedSketch) -> Tensor:
    return form.wgrad(saved.draw().t() @ grad_NO, saved.sketch_KD)


def _projection(form: WeightProduct, grad_NO: Tensor, saved: SavedProjection) -> Tensor:
    product, matrix_DK = form.wgrad(grad_NO, saved.projection_NK), saved.draw()
    return product @ matrix_DK.t() if form.output_dim == 0 else matrix_DK @ product


def _direction(form: WeightProduct, grad_NO: Tensor, saved: SavedDirection) -> Tensor:
    product, num_features = form.wgrad(grad_NO, saved.along_NG), saved.shape[1]
    if form.output_dim == 0:
        return (product[:, :, None] * saved.direction_C).flatten(1)[:, :num_features]
    return (product[:, None, :] * saved.direction_C[:, None]).flatten(0, 1)[:num_features]


def _representatives(form: WeightProduct, grad_NO: Tensor, saved: SavedRepresentatives) -> Tensor:
    # The gradients of the rows that one row stands for are summed before they are multiplied, in float32 at least.
    dtype = torch.promote_types(grad_NO.dtype, torch.float32)
    weighted_NO = grad_NO.to(dtype) * saved.factor_N.to(dtype)[:, None]
    sum_KO = weighted_NO.new_zeros(len(saved.row_KD), grad_NO.shape[1]).index_add_(0, saved.index_N, weighted_NO)
    return form.wgrad(sum_KO.to(grad_NO.dtype), saved.row_KD)


_KERNELS: dict[type[Saved], Callable[[WeightProduct, Tensor, Any], Tensor]] = {
    SavedRows: _rows,
    SavedColumns: _columns,
    SavedSketch: _sketch,
    SavedProjection: _projection,
    SavedDirection: _direction,
    SavedRepresentatives: _representatives,
}
