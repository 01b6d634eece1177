"""The Triton kernels as PyTorch operators, ``torch.ops.sparsebp``, with output shapes for fake tensors and compilers.

Shape letters: N rows, D input width, O output width, K kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.policy.kernel import blocks, rows, score

ROWS = "Tensor grad, Tensor other, Tensor index, Tensor? weight"
BLOCKS = "Tensor grad, Tensor other, Tensor index, int high, int wide, Tensor? weight"


def _dgrad_of_blocks(
    grad_NO: Tensor, weight_OD: Tensor, index_K: Tensor, high: int, wide: int, weight_K: Tensor | None
) -> Tensor:
    return blocks.multiply_dgrad(grad_NO, weight_OD, index_K, (high, wide), weight_K)


def _wgrad_of_blocks(
    grad_NO: Tensor, x_ND: Tensor, index_K: Tensor, high: int, wide: int, weight_K: Tensor | None, by_input: bool
) -> Tensor:
    return blocks.multiply_wgrad(grad_NO, x_ND, index_K, (high, wide), weight_K, by_input=by_input)


def _wgrad_of_rows(grad_NO: Tensor, x_ND: Tensor, index_K: Tensor, weight_K: Tensor | None, by_input: bool) -> Tensor:
    return rows.multiply_wgrad(grad_NO, x_ND, index_K, weight_K, by_input=by_input)


def _like_dgrad(grad_NO: Tensor, weight_OD: Tensor, *_: object) -> Tensor:
    return grad_NO.new_empty(len(grad_NO), weight_OD.shape[1])


def _like_wgrad(grad_NO: Tensor, x_ND: Tensor, *rest: object) -> Tensor:
    return rows.empty_wgrad(grad_NO, x_ND.shape[1], by_input=bool(rest[-1]))


def _define(
    name: str, arguments: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    torch.library.define(f"sparsebp::{name}", f"({arguments}) -> Tensor")
    torch.library.impl(f"sparsebp::{name}", "CUDA", function)
    torch.library.register_fake(f"sparsebp::{name}", fake)
    operation: Any = getattr(torch.ops.sparsebp, name)
    return operation.default  # type: ignore[no-any-return]


dgrad_of_rows = _define("dgrad_of_rows", ROWS, rows.multiply_dgrad, _like_dgrad)
wgrad_of_rows = _define("wgrad_of_rows", f"{ROWS}, bool by_input", _wgrad_of_rows, _like_wgrad)
dgrad_of_blocks = _define("dgrad_of_blocks", BLOCKS, _dgrad_of_blocks, _like_dgrad)
wgrad_of_blocks = _define("wgrad_of_blocks", f"{BLOCKS}, bool by_input", _wgrad_of_blocks, _like_wgrad)
row_norm = _define(
    "row_norm", "Tensor grad", score.row_norm, lambda grad: grad.new_empty(len(grad), dtype=torch.float32)
)
column_norm = _define(
    "column_norm", "Tensor grad", score.column_norm, lambda grad: grad.new_empty(grad.shape[1], dtype=torch.float32)
)
two_of_four = _define(
    "two_of_four",
    "Tensor score",
    score.largest_two_of_four,
    lambda score: score.new_empty(score.shape, dtype=torch.bool),
)
