"""Triton kernels of scores, each in one read: norms of rows, norms of columns, and the two largest of every four.

The kernels divide entries by a power of two near the largest entry so far before they square them in float32, so that
squares neither underflow nor overflow. When a larger entry comes, they scale the sum so far down.

Shape letters: N rows, O output width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebp_cli.policy.kernel.rows import IS_INTERPRETED, on_device

FEW_ROWS = 128  # one program reads a row; for fewer rows PyTorch's reduction uses more of the device
ROWS_PER_PART = 32 if IS_INTERPRETED else 256  # entries of a column that one program sums
WIDTH = 64 if IS_INTERPRETED else 2048  # entries of a row that a program reads at a time
GROUPS = 32 if IS_INTERPRETED else 1024  # groups of four entries for one program


@triton.jit
def _power(size):
    """Return the exponent bits of a float32 in (0, inf), clamped so that the power and its inverse are normal."""
    return tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)


@triton.jit
def _ratio(bits, other):
    """Return the first power over the second, which must be at least as large; 0 on underflow."""
    return tl.maximum(bits - other + (127 << 23), 0).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(bits):
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def norm_of_rows(grad, out, num_outputs, grad_row, grad_column, WIDTH: tl.constexpr):
    """Compute the 2-norm of each row."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, WIDTH)
    power = tl.full([], 1 << 23, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, num_outputs, WIDTH):
        inside = o < num_outputs - first
        place = grad + row * grad_row + (first + o) * grad_column
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        larger = tl.maximum(power, _power(tl.max(tl.abs(value), 0)))
        value *= _inverse(larger)
        ratio = _ratio(power, larger)
        total = total * ratio * ratio + tl.sum(value * value, 0)
        power = larger
    tl.store(out + row, tl.sqrt(total) * power.to(tl.float32, bitcast=True))


@triton.jit
def norm_of_column_parts(
    grad, powers, totals, num_rows, num_outputs, grad_row, grad_column,
    ROWS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute a power of two and the sum of squares divided by its square, for each column and each ``ROWS`` rows."""
    o = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    begin = tl.program_id(1) * ROWS
    power = tl.full((WIDE,), 1 << 23, tl.int32)
    total = tl.zeros((WIDE,), tl.float32)
    for first in range(0, ROWS, HIGH):
        row = (begin + first + tl.arange(0, HIGH)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (o < num_outputs)[None, :]
        place = grad + row[:, None] * grad_row + o[None, :] * grad_column
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        larger = tl.maximum(power, _power(tl.max(tl.abs(value), 0)))
        value *= _inverse(larger)[None, :]
        ratio = _ratio(power, larger)
        total = total * ratio * ratio + tl.sum(value * value, 0)
        power = larger
    place = tl.program_id(1) * num_outputs + o
    tl.store(powers + place, power, mask=o < num_outputs)
    tl.store(totals + place, total, mask=o < num_outputs)


@triton.jit
def norm_of_columns(powers, totals, out, num_parts, num_outputs, WIDE: tl.constexpr):
    """Compute the 2-norm of each column: add its parts in order."""
    o = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    power = tl.full((WIDE,), 1 << 23, tl.int32)
    total = tl.zeros((WIDE,), tl.float32)
    for part in range(num_parts):
        place = part * num_outputs + o
        mine = tl.load(powers + place, mask=o < num_outputs, other=1 << 23)
        larger = tl.maximum(power, mine)
        before, now = _ratio(power, larger), _ratio(mine, larger)
        total = total * before * before + tl.load(totals + place, mask=o < num_outputs, other=0.0) * now * now
        power = larger
    tl.store(out + o, tl.sqrt(total) * power.to(tl.float32, bitcast=True), mask=o < num_outputs)


@triton.jit
def two_of_four(score, mask, num_groups, groups_of_row, score_row, mask_row, GROUPS: tl.constexpr):
    """Set the mask of the two largest of every four neighbours. Between equal entries the first wins."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < num_groups
    row, four = group // groups_of_row, group % groups_of_row * 4
    place = (row * score_row + four)[:, None] + tl.arange(0, 4)[None, :]
    value = tl.load(score + place, mask=inside[:, None], other=0.0).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))  # noqa: PLR0124 - a NaN, as large as infinity
    even, odd = tl.split(tl.reshape(value, (GROUPS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a, b, c = (second > first).to(tl.int32), (third > first).to(tl.int32), (fourth > first).to(tl.int32)
    d, e, f = (third > second).to(tl.int32), (fourth > second).to(tl.int32), (fourth > third).to(tl.int32)
    # Each pair has one winner. The two entries with at most one defeat are kept.
    even = tl.join(a + b + c < 2, (1 - b) + (1 - d) + f < 2)
    odd = tl.join((1 - a) + d + e < 2, (1 - c) + (1 - e) + (1 - f) < 2)
    kept = tl.reshape(tl.join(even, odd), (GROUPS, 4))
    place = (row * mask_row + four)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(mask + place, kept.to(tl.int8), mask=inside[:, None])


def row_norm(grad_NO: Tensor) -> Tensor:
    """Return the 2-norm of each row, float32."""
    if len(grad_NO) < FEW_ROWS and grad_NO.shape[1] > WIDTH and not IS_INTERPRETED:
        norm_in_double: Tensor = torch.linalg.vector_norm(grad_NO, dim=1, dtype=torch.float64)
        return norm_in_double.to(torch.float32)
    norm_N = grad_NO.new_empty(len(grad_NO), dtype=torch.float32)
    if len(grad_NO):
        with on_device(grad_NO):
            norm_of_rows[(len(grad_NO),)](grad_NO, norm_N, grad_NO.shape[1], *grad_NO.stride(), WIDTH=WIDTH)
    return norm_N


def column_norm(grad_NO: Tensor) -> Tensor:
    """Return the 2-norm of each column, float32."""
    num_rows, num_outputs = grad_NO.shape
    num_parts, high, wide = -(-num_rows // ROWS_PER_PART), 16, 128
    norm_O = grad_NO.new_empty(num_outputs, dtype=torch.float32)
    if num_outputs:
        powers = grad_NO.new_empty(num_parts, num_outputs, dtype=torch.int32)
        totals = grad_NO.new_empty(num_parts, num_outputs, dtype=torch.float32)
        with on_device(grad_NO):
            if num_parts:
                norm_of_column_parts[(-(-num_outputs // wide), num_parts)](
                    grad_NO, powers, totals, num_rows, num_outputs, *grad_NO.stride(),
                    ROWS=ROWS_PER_PART, HIGH=high, WIDE=wide,
                )  # fmt: skip
            norm_of_columns[(-(-num_outputs // wide),)](powers, totals, norm_O, num_parts, num_outputs, WIDE=wide)
    return norm_O


def largest_two_of_four(score_NO: Tensor) -> Tensor:
    """Return the mask of the two largest of every four neighbours; a last group of fewer is kept whole."""
    num_rows, num_outputs = score_NO.shape
    groups_of_row = num_outputs // 4
    mask_NO = torch.ones(score_NO.shape, dtype=torch.bool, device=score_NO.device)
    num_groups = num_rows * groups_of_row
    if num_groups:
        score_NO = score_NO if score_NO.stride(1) == 1 else score_NO.contiguous()
        with on_device(score_NO):
            two_of_four[(-(-num_groups // GROUPS),)](
                score_NO, mask_NO.view(torch.int8), num_groups, groups_of_row, score_NO.stride(0), num_outputs,
                GROUPS=GROUPS,
            )  # fmt: skip
    return mask_NO
