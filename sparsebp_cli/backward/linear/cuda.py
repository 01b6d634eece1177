"""Products of selected gradients on CUDA: Triton's kernels where they run, else masked dense products for blocks.

The kernels of :mod:`sparsebp_cli.backward.linear.function` suit CPUs. On a GPU, one small product for each block is
many times slower than a dense product, so without Triton the gradient is masked and multiplied densely.

Shape letters: N rows, D input width, O output width, K kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsebp_cli.policy import Blocks, Rows, Selection, kernel

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input (N, D), weight and bias
CudaForm = Callable[..., Gradients | None]  # multiplies a kind of selection; None: mask, and multiply densely


def find_form(selection: type[Selection], grad_NO: Tensor) -> CudaForm | None:
    """Return CUDA's function for a type of selection, or None where the CPU's function is as good."""
    if not kernel.is_on_gpu(grad_NO) or selection not in (Rows, Blocks):
        return None
    if kernel.find(grad_NO, multiplies=True) is None:
        return _mask if selection is Blocks else None
    return _rows if selection is Rows else _blocks


def find_masked(grad_NO: Tensor) -> frozenset[type[Selection]]:
    """Return the types of selection that this device multiplies densely, without savings."""
    return frozenset(kind for kind in (Blocks,) if find_form(kind, grad_NO) is _mask)


def _mask(*_: Any, **__: Any) -> None:
    """Let the caller mask the gradient and multiply densely."""


def _rows(
    form: Any, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Rows, needs: Any
) -> Gradients:
    operation = kernel.find(grad_NO, multiplies=True)
    index_K, weight_K = selection.index_K, selection.weight_K
    dgrad_ND = wgrad = None
    if weight is not None:
        dgrad_ND = operation.dgrad_of_rows(grad_NO, form.by_output(weight), index_K, weight_K)
    if x_ND is not None:
        wgrad = form.by_output(operation.wgrad_of_rows(grad_NO, x_ND, index_K, weight_K, form.output_dim == 1))
    return dgrad_ND, wgrad, selection.gather(grad_NO).sum(0) if needs.bias else None


def _blocks(
    form: Any, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Blocks, needs: Any
) -> Gradients:
    operation = kernel.find(grad_NO, multiplies=True)
    index_K, (high, wide), weight_K = selection.index_K, selection.block_shape, selection.weight_K
    dgrad_ND = wgrad = None
    if weight is not None:
        dgrad_ND = operation.dgrad_of_blocks(grad_NO, form.by_output(weight), index_K, high, wide, weight_K)
    if x_ND is not None:
        wgrad_OD = operation.wgrad_of_blocks(grad_NO, x_ND, index_K, high, wide, weight_K, form.output_dim == 1)
        wgrad = form.by_output(wgrad_OD)
    return dgrad_ND, wgrad, selection.apply(grad_NO).sum(0) if needs.bias else None
