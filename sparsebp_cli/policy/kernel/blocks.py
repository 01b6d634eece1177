"""Triton kernels of kept blocks: each program sums over the kept blocks of one row or column of blocks.

The caller sorts the blocks by row for dgrad and by column for wgrad, and finds the first of each row or column on the
device, so the host does not wait. The kernels store zeros for a row without a kept block.

Shape letters: N rows, D input width, O output width, K kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebp_cli.policy.kernel.rows import IS_INTERPRETED, Tile, empty_wgrad, on_device, options, scale


@triton.jit
def dgrad_of_blocks(
    grad, weight, across, start, factor, out, num_rows, num_inputs, num_outputs, block_high, block_wide, num_parts,
    grad_row, grad_column, weight_output, weight_input, out_row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute out = (factor * kept blocks of grad) @ weight; a row of blocks is computed in ``num_parts`` tiles."""
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    down, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    n = part * HIGH + tl.arange(0, HIGH)
    is_row = (n < block_high) & (n < num_rows - down * block_high)
    # Offsets into a large tensor exceed int32.
    row = (down * block_high + n).to(tl.int64)
    begin, end = tl.load(start + down), tl.load(start + down + 1)
    num_pieces = tl.cdiv(block_wide, DEEP)  # pieces of one block along the sum
    grad_row_of = grad + row[:, None] * grad_row
    # Columns beyond the last wrap around, so that loads need no condition. They are not stored.
    weight_column_of = weight + (d % num_inputs).to(tl.int64)[None, :] * weight_input
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for step in range((end - begin) * num_pieces):
        block = begin + step // num_pieces
        within = step % num_pieces * DEEP + tl.arange(0, DEEP)
        o = tl.load(across + block) * block_wide + within
        inside = (within < block_wide) & (o < num_outputs)
        left = tl.load(grad_row_of + o[None, :] * grad_column, mask=is_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_column_of + o[:, None] * weight_output, mask=inside[:, None], other=0.0)
        if WEIGHTED:
            left = scale(left, tl.load(factor + block))
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    stored = is_row[:, None] & (d < num_inputs)[None, :]
    tl.store(out + row[:, None] * out_row + d[None, :], total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def wgrad_of_blocks(
    grad, x, down, start, factor, out, num_rows, num_inputs, num_outputs, block_high, block_wide, num_parts,
    grad_row, grad_column, x_row, x_column, out_output, out_input,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute out = (factor * kept blocks of grad).T @ x; a column of blocks is computed in ``num_parts`` tiles."""
    d = (tl.program_id(1) * WIDE + tl.arange(0, WIDE)).to(tl.int64)
    across, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    within = part * HIGH + tl.arange(0, HIGH)
    is_column = (within < block_wide) & (within < num_outputs - across * block_wide)
    o = (across * block_wide + within).to(tl.int64)
    begin, end = tl.load(start + across), tl.load(start + across + 1)
    num_pieces = tl.cdiv(block_high, DEEP)
    grad_column_of = grad + o[None, :] * grad_column
    x_column_of = x + (d % num_inputs)[None, :] * x_column
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for step in range((end - begin) * num_pieces):
        block = begin + step // num_pieces
        n = step % num_pieces * DEEP + tl.arange(0, DEEP)
        row = tl.load(down + block) * block_high + n
        inside = (n < block_high) & (row < num_rows)
        left = tl.load(grad_column_of + row[:, None] * grad_row, mask=inside[:, None] & is_column[None, :], other=0.0)
        right = tl.load(x_column_of + row[:, None] * x_row, mask=inside[:, None], other=0.0)
        if WEIGHTED:
            left = scale(left, tl.load(factor + block))
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    stored = is_column[:, None] & (d < num_inputs)[None, :]
    place = out + o[:, None] * out_output + d[None, :] * out_input
    tl.store(place, total.to(out.dtype.element_ty), mask=stored)


def multiply_dgrad(
    grad_NO: Tensor, weight_OD: Tensor, index_K: Tensor, block_shape: tuple[int, int], weight_K: Tensor | None
) -> Tensor:
    """Return the gradient of the input, (N, D), from the kept blocks."""
    (num_rows, num_outputs), num_inputs = grad_NO.shape, weight_OD.shape[1]
    (rows, columns), wide = block_shape, -(-num_outputs // block_shape[1])
    high = -(-num_rows // rows)
    order_K, start, factor_K = _sort(index_K, high, wide, weight_K)
    dgrad_ND = grad_NO.new_empty(num_rows, num_inputs)
    if dgrad_ND.numel():
        tile = choose_tile(rows, columns)
        num_parts = -(-rows // tile.high)
        with on_device(grad_NO):
            dgrad_of_blocks[(high * num_parts, -(-num_inputs // tile.wide))](
                grad_NO, weight_OD, order_K % max(wide, 1), start, factor_K, dgrad_ND, num_rows, num_inputs,
                num_outputs, rows, columns, num_parts, *grad_NO.stride(), *weight_OD.stride(), dgrad_ND.stride(0),
                WEIGHTED=weight_K is not None, **options(tile, grad_NO.dtype, indirect=True),
            )  # fmt: skip
    return dgrad_ND


def multiply_wgrad(
    grad_NO: Tensor,
    x_ND: Tensor,
    index_K: Tensor,
    block_shape: tuple[int, int],
    weight_K: Tensor | None,
    *,
    by_input: bool = False,
) -> Tensor:
    """Return the gradient of the weight, (O, D); ``by_input`` stores it as (D, O) and returns its transpose."""
    (num_rows, num_outputs), num_inputs = grad_NO.shape, x_ND.shape[1]
    (rows, columns), wide = block_shape, -(-num_outputs // block_shape[1])
    high = -(-num_rows // rows)
    turned_K = index_K % max(wide, 1) * high + index_K // max(wide, 1)  # indices of the blocks, column by column
    order_K, start, factor_K = _sort(turned_K, wide, high, weight_K)
    wgrad_OD = empty_wgrad(grad_NO, num_inputs, by_input=by_input)
    if wgrad_OD.numel():
        tile = choose_tile(columns, rows)
        num_parts = -(-columns // tile.high)
        with on_device(grad_NO):
            wgrad_of_blocks[(wide * num_parts, -(-num_inputs // tile.wide))](
                grad_NO, x_ND, order_K % max(high, 1), start, factor_K, wgrad_OD, num_rows, num_inputs,
                num_outputs, rows, columns, num_parts, *grad_NO.stride(), *x_ND.stride(), *wgrad_OD.stride(),
                WEIGHTED=weight_K is not None, **options(tile, grad_NO.dtype, indirect=True),
            )  # fmt: skip
    return wgrad_OD


def choose_tile(high: int, deep: int) -> Tile:
    """Return the tile for blocks that are ``high`` along the product and ``deep`` along the sum; a tensor core
    multiplies at least 16 entries at a time.
    """
    high, deep = max(16, triton.next_power_of_2(high)), max(16, triton.next_power_of_2(deep))
    if IS_INTERPRETED:
        return Tile(min(high, 32), 32, min(deep, 32), 4, 1)
    return Tile(min(high, 128), 128, min(deep, 64), 8 if high >= 128 else 4, 3)


def _sort(index_K: Tensor, num_lines: int, length: int, weight_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted indices, the first position of each of ``num_lines`` lines of ``length`` blocks, and the
    weights in the sorted order.
    """
    order_K, place_K = index_K.sort()
    first = torch.arange(num_lines + 1, device=index_K.device) * length
    return order_K, torch.searchsorted(order_K, first), order_K if weight_K is None else weight_K[place_K]
