"""Small cases of every Triton kernel on a device, compared with PyTorch's operations before the kernels are used.

The project's tests run in Triton's interpreter and compile for two generations of devices. Only a run on the actual
device shows what its driver and compiler make of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Largest error, as a fraction of the largest entry. TF32 rounds to ten bits.
LIMIT = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 4e-3,
}
NUM_ROWS, NUM_OUTPUTS, NUM_INPUTS, BLOCK = 150, 76, 90, 32


def find_wrong(operation: Any, device: torch.device, product: torch.dtype | None) -> list[str]:
    """Return the names of wrong kernels: kernels of products in this dtype, or kernels of scores if it is None."""
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_ROWS, NUM_OUTPUTS), (NUM_OUTPUTS, NUM_INPUTS), (NUM_ROWS, NUM_INPUTS)
    dtype = product or torch.float32
    grad, weight, x = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    pairs = check_scores(operation, grad) if product is None else check_products(operation, grad, weight, x)
    return [name for name, found, expected in pairs if not _is_near(found, expected, LIMIT[dtype])]


def check_scores(operation: Any, grad: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each kernel of scores, its result and the expected result."""
    yield "row_norm", operation.row_norm(grad), grad.norm(dim=1)
    yield "column_norm", operation.column_norm(grad), grad.norm(dim=0)
    places = grad.view(NUM_ROWS, -1, 4).topk(2, dim=-1).indices
    mask = torch.zeros_like(grad).view(NUM_ROWS, -1, 4).scatter_(2, places, 1.0).view_as(grad)
    yield "two_of_four", operation.two_of_four(grad), mask


def check_products(operation: Any, grad: Tensor, weight: Tensor, x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each kernel of products, its result and the expected result, with and without weights."""
    rows = torch.arange(1, NUM_ROWS, 2, device=grad.device)
    high, wide = -(-NUM_ROWS // BLOCK), -(-NUM_OUTPUTS // BLOCK)
    blocks = torch.arange(0, high * wide, 2, device=grad.device)
    for factor in (None, 0.5):
        of_rows, of_blocks = (None if factor is None else torch.full((len(k),), factor) for k in (rows, blocks))
        of_rows, of_blocks = (None if f is None else f.to(grad.device) for f in (of_rows, of_blocks))
        masked = torch.zeros_like(grad).index_copy_(0, rows, grad[rows] * (factor or 1.0))
        yield "dgrad_of_rows", operation.dgrad_of_rows(grad, weight, rows, of_rows), masked @ weight
        yield "wgrad_of_rows", operation.wgrad_of_rows(grad, x, rows, of_rows, False), masked.t() @ x
        kept = torch.zeros(high * wide, device=grad.device, dtype=grad.dtype).index_fill_(0, blocks, factor or 1.0)
        spread = kept.view(high, wide).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        masked = grad * spread[:NUM_ROWS, :NUM_OUTPUTS]
        found = operation.dgrad_of_blocks(grad, weight, blocks, BLOCK, BLOCK, of_blocks)
        yield "dgrad_of_blocks", found, masked @ weight
        found = operation.wgrad_of_blocks(grad, x, blocks, BLOCK, BLOCK, of_blocks, False)
        yield "wgrad_of_blocks", found, masked.t() @ x


def _is_near(found: Tensor, expected: Tensor, limit: float) -> bool:
    found, expected = found.double(), expected.double()
    return found.shape == expected.shape and bool((found - expected).abs().max() <= limit * expected.abs().max())
