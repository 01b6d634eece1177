"""Triton kernels of selected rows: products that gather in their loads and scatter in their stores.

dgrad reads the kept rows of the gradient in place and writes the products to the same rows of the result. wgrad gathers
both operands along the sum. Gathered values stay in registers. Tiles have fixed sizes: an autotuner would make the
order of sums, and so the last bits of a run, depend on timings.

Shape letters: N rows, D input width, O output width, K kept.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED: bool = triton.knobs.runtime.interpret  # the interpreter multiplies bfloat16 wrongly, without a warning


class Tile(NamedTuple):
    """The size of the part of a product that one program computes, and its launch options."""

    high: int
    wide: int
    deep: int  # entries of the sum that the program loads at a time
    num_warps: int
    num_stages: int


# An autotuner would choose the tile, and with it the order of sums, by timings. See decision 60.
WIDE = Tile(128, 256, 64, 8, 3)  # only on Hopper; older tensor cores would need more registers than exist
LARGE = Tile(128, 128, 64, 8, 3)
SMALL = Tile(64, 64, 64, 4, 4)
INTERPRETED = Tile(16, 32, 16, 4, 1)  # the interpreter takes seconds for large tiles
NUM_TILES = 120  # an H100 has 132 multiprocessors: a product of fewer large tiles leaves many of them idle


@triton.jit
def _place(num_high, num_wide, GROUP: tl.constexpr):
    """Return the row and column of this program's tile. Consecutive programs compute neighbouring tiles, so that they
    read the same operands from the cache.
    """
    number = tl.program_id(0)
    band = number // (GROUP * num_wide)
    height = tl.minimum(num_high - band * GROUP, GROUP)
    within = number - band * GROUP * num_wide
    return band * GROUP + within % height, within // height


@triton.jit
def scale(value, factor):
    """Return ``value * factor``. Round the factor to the dtype of the values first, like PyTorch."""
    return (value.to(tl.float32) * factor.to(value.dtype).to(tl.float32)).to(value.dtype)


@triton.jit
def dgrad_of_rows(
    grad, weight, index, factor, out, num_kept, num_inputs, num_outputs,
    grad_row, grad_column, weight_output, weight_input, out_row,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute out[index] = factor * (grad[index] @ weight)."""
    tile_high, tile_wide = _place(tl.cdiv(num_kept, HIGH), tl.cdiv(num_inputs, WIDE), 8)
    k = tile_high * HIGH + tl.arange(0, HIGH)
    d = tile_wide * WIDE + tl.arange(0, WIDE)
    o = tl.arange(0, DEEP)
    row = tl.load(index + k, mask=k < num_kept, other=0)
    # Rows and features past the end repeat existing ones. They are not stored.
    grad_tile = grad + row[:, None] * grad_row + o[None, :] * grad_column
    weight_tile = weight + o[:, None] * weight_output + (d % num_inputs).to(tl.int64)[None, :] * weight_input
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for first in range(0, num_outputs, DEEP):
        inside = o < num_outputs - first
        left = tl.load(grad_tile, mask=inside[None, :], other=0.0)
        right = tl.load(weight_tile, mask=inside[:, None], other=0.0)
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        grad_tile += DEEP * grad_column
        weight_tile += DEEP * weight_output
    if WEIGHTED:
        total *= tl.load(factor + k, mask=k < num_kept, other=0.0).to(grad.dtype.element_ty).to(tl.float32)[:, None]
    stored = (k < num_kept)[:, None] & (d < num_inputs)[None, :]
    tl.store(out + row[:, None] * out_row + d[None, :], total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def wgrad_of_rows(
    grad, x, index, factor, out, num_kept, num_inputs, num_outputs,
    grad_row, grad_column, x_row, x_column, out_output, out_input,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute out = (factor * grad[index]).T @ x[index]."""
    tile_high, tile_wide = _place(tl.cdiv(num_outputs, HIGH), tl.cdiv(num_inputs, WIDE), 8)
    o = (tile_high * HIGH + tl.arange(0, HIGH)).to(tl.int64)
    d = (tile_wide * WIDE + tl.arange(0, WIDE)).to(tl.int64)
    grad_column_of = grad + (o % num_outputs)[None, :] * grad_column
    x_column_of = x + (d % num_inputs)[None, :] * x_column
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for first in range(0, num_kept, DEEP):
        k = first + tl.arange(0, DEEP)
        inside = k < num_kept
        row = tl.load(index + k, mask=inside, other=0)[:, None]
        left = tl.load(grad_column_of + row * grad_row, mask=inside[:, None], other=0.0)
        right = tl.load(x_column_of + row * x_row, mask=inside[:, None], other=0.0)
        if WEIGHTED:
            left = scale(left, tl.load(factor + k, mask=inside, other=0.0)[:, None])
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    stored = (o < num_outputs)[:, None] & (d < num_inputs)[None, :]
    place = out + o[:, None] * out_output + d[None, :] * out_input
    tl.store(place, total.to(out.dtype.element_ty), mask=stored)


def multiply_dgrad(grad_NO: Tensor, weight_OD: Tensor, index_K: Tensor, weight_K: Tensor | None) -> Tensor:
    """Return the gradient of the input, (N, D), zero in rows that are not kept."""
    (num_rows, num_outputs), num_inputs, num_kept = grad_NO.shape, weight_OD.shape[1], index_K.numel()
    dgrad_ND = grad_NO.new_zeros(num_rows, num_inputs)
    if num_kept and num_outputs and num_inputs:
        tile = choose_tile(num_kept, num_inputs, grad_NO)
        factor = index_K if weight_K is None else weight_K.contiguous()
        with on_device(grad_NO):
            dgrad_of_rows[(count_tiles(tile, num_kept, num_inputs),)](
                grad_NO, weight_OD, index_K.contiguous(), factor, dgrad_ND, num_kept, num_inputs, num_outputs,
                *grad_NO.stride(), *weight_OD.stride(), dgrad_ND.stride(0),
                WEIGHTED=weight_K is not None, **options(tile, grad_NO.dtype),
            )  # fmt: skip
    return dgrad_ND


def multiply_wgrad(
    grad_NO: Tensor, x_ND: Tensor, index_K: Tensor, weight_K: Tensor | None, *, by_input: bool = False
) -> Tensor:
    """Return the gradient of the weight, (O, D); ``by_input`` stores it as (D, O) and returns its transpose."""
    num_outputs, num_inputs, num_kept = grad_NO.shape[1], x_ND.shape[1], index_K.numel()
    wgrad_OD = empty_wgrad(grad_NO, num_inputs, by_input=by_input)
    if wgrad_OD.numel():
        tile = choose_tile(num_outputs, num_inputs, grad_NO)
        factor = index_K if weight_K is None else weight_K.contiguous()
        with on_device(grad_NO):
            wgrad_of_rows[(count_tiles(tile, num_outputs, num_inputs),)](
                grad_NO, x_ND, index_K.contiguous(), factor, wgrad_OD, num_kept, num_inputs, num_outputs,
                *grad_NO.stride(), *x_ND.stride(), *wgrad_OD.stride(),
                WEIGHTED=weight_K is not None, **options(tile, grad_NO.dtype, indirect=True),
            )  # fmt: skip
    return wgrad_OD


def empty_wgrad(grad_NO: Tensor, num_inputs: int, *, by_input: bool) -> Tensor:
    """Return an uninitialized (O, D) matrix, with the memory layout of (D, O) if ``by_input``."""
    num_outputs = grad_NO.shape[1]
    if by_input:
        return grad_NO.new_empty(num_inputs, num_outputs).t()
    return grad_NO.new_empty(num_outputs, num_inputs)


def choose_tile(high: int, wide: int, like: Tensor) -> Tile:
    """Return the tile for a product of this size, for the device and dtype of the tensor ``like``."""
    if IS_INTERPRETED:
        return INTERPRETED
    capability = torch.cuda.get_device_capability(like.device)
    return find_tile(high, wide, is_hopper=capability == (9, 0) and like.element_size() == 2)


def find_tile(high: int, wide: int, *, is_hopper: bool) -> Tile:
    """Return the largest tile that splits the product into at least ``NUM_TILES`` tiles, else ``SMALL``."""
    fitting = [WIDE, LARGE] if is_hopper else [LARGE]
    return next((tile for tile in fitting if count_tiles(tile, high, wide) >= NUM_TILES), SMALL)


def count_tiles(tile: Tile, high: int, wide: int) -> int:
    """Return how many tiles cover a product."""
    return -(-high // tile.high) * -(-wide // tile.wide)


def options(tile: Tile, dtype: torch.dtype, *, indirect: bool = False) -> dict[str, Any]:
    """Return the compile options of a product. ``indirect``: each step of the sum first loads the indices of its
    operands, which needs one more pipeline stage.
    """
    is_wide = dtype == torch.float32 and not IS_INTERPRETED
    found: dict[str, Any] = {"HIGH": tile.high, "WIDE": tile.wide, "DEEP": tile.deep // 2 if is_wide else tile.deep}
    # Float32 products come here only if TF32 is allowed. The interpreter always multiplies in float32.
    found |= {"PRECISION": "tf32" if is_wide else "ieee", "INTERPRETED": IS_INTERPRETED}
    return found | {"num_warps": tile.num_warps, "num_stages": tile.num_stages + indirect}


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels run on the device of a tensor."""
    # Triton launches on the current device, even if its arguments are on another.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
