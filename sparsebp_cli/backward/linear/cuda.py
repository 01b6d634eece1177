"""What CUDA multiplies selected gradients with: Triton's kernels where they run, and masked dense products for blocks.

The forms of :mod:`sparsebp_cli.backward.linear.function` were made for CPUs. On a GPU one small product a block is many
times slower than a dense product, so without Triton the gradient is masked and multiplied densely.

Shape letters: N rows, D input width, O output width, K kept.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from sparsebp_cli import kernel
from sparsebp_cli.policy import Blocks, Rows, Selection

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Layout(Protocol):
    """How the weight lies in memory."""

    output_dim: int

    def by_output(self, weight: Tensor) -> Tensor:
        """Return the weight as (O, D), or back, without a copy."""


class Form(Protocol):
    """One way to multiply a kind of selection; it may return None for a masked dense product."""

    def __call__(
        self, form: Any, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Any, needs: Any
    ) -> Gradients | None:
        """Return the gradients of input (N, D), weight and bias."""


def find_form(selection: type[Selection], grad_NO: Tensor) -> Form | None:
    """Return CUDA's own form for a kind of selection, or None where the form of CPUs is as good."""
    if not kernel.is_on_gpu(grad_NO) or selection not in (Rows, Blocks):
        return None
    if kernel.find(grad_NO, multiplies=True) is None:
        return _mask if selection is Blocks else None
    return _rows if selection is Rows else _blocks


def find_masked(grad_NO: Tensor) -> frozenset[type[Selection]]:
    """Return the kinds of selection that this device multiplies densely, so that no multiplication is saved."""
    return frozenset(kind for kind in (Blocks,) if find_form(kind, grad_NO) is _mask)


def _mask(*_: Any, **__: Any) -> None:
    """Let the caller mask the gradient and multiply densely."""


def _rows(
    form: Layout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Rows, needs: Any
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
    form: Layout, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Blocks, needs: Any
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
