"""The multiplications of a linear layer's backward that a selection leaves, one kernel a kind of selection.

Each equals the dense backward of ``selection.apply(grad_NO)``: that is the reference form, which any selection has, and
which :func:`run_kernel` falls back to where a kernel does not apply.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection, TwoToFour

if TYPE_CHECKING:
    from sparsebp_cli.backward.linear.function import Form

# Below this share of kept entries a product in CSR, with its conversion, beats masking and a dense one: break-even was
# 0.077 in `sparsebp bench topk` on two CPU cores, torch 2.13, MKL: docs/log.md, 2026-11-21.
CSR_BELOW = 0.05

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Needs(NamedTuple):
    """Which gradients autograd asks for."""

    dgrad: bool
    wgrad: bool
    bias: bool


def kernel_share(selection: type[Selection] | None, budget: float) -> float:
    """Return which share of the dense multiplications a kernel is meant to leave.

    Args:
        selection: The kind; None: dense.
        budget: Share of entries that is kept, in (0, 1].

    Returns:
        A share in [0, 1]. 2:4 counts as dense: hardware that multiplies it at twice the rate does not do fewer.
    """
    if selection in (Rows, Columns, Blocks) or (selection is Elements and budget < CSR_BELOW):
        return budget
    return 1.0


def run_kernel(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: Selection, needs: Needs
) -> Gradients | None:
    """Multiply only what was selected.

    Args:
        form: How the layer stores its weight.
        grad_NO: The gradient of the output.
        x_ND: The input; None when no wgrad is wanted.
        weight: The weight; None when no dgrad is wanted.
        selection: What is kept.
        needs: Which gradients are wanted.

    Returns:
        Gradients of input (N, D), weight and bias; None where only the reference form applies.
    """
    kernel = _KERNELS.get(type(selection))
    return None if kernel is None else kernel(form, grad_NO, x_ND, weight, selection, needs)


def _rows(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, rows: Rows, needs: Needs
) -> Gradients:
    grad_KO = rows.gather(grad_NO)
    dgrad_ND = None
    if weight is not None:
        dgrad_KD = grad_KO.mm(form.by_output(weight))
        dgrad_ND = dgrad_KD.new_zeros(grad_NO.shape[0], dgrad_KD.shape[1]).index_copy_(0, rows.index_K, dgrad_KD)
    wgrad = None if x_ND is None else form.wgrad(grad_KO, x_ND.index_select(0, rows.index_K))
    return dgrad_ND, wgrad, grad_KO.sum(0) if needs.bias else None


def _columns(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, columns: Columns, needs: Needs
) -> Gradients:
    grad_NK = columns.gather(grad_NO)
    num_outputs = grad_NO.shape[1]
    dgrad_ND = None
    if weight is not None:
        dgrad_ND = grad_NK.mm(form.by_output(weight.index_select(form.output_dim, columns.index_K)))
    wgrad = None
    if x_ND is not None:
        wgrad_K = form.wgrad(grad_NK, x_ND)  # (K, D) or (D, K), as the weight lies
        shape = list(wgrad_K.shape)
        shape[form.output_dim] = num_outputs
        wgrad = wgrad_K.new_zeros(shape).index_copy_(form.output_dim, columns.index_K, wgrad_K)
    bias_grad = None
    if needs.bias:
        bias_grad = grad_NK.new_zeros(num_outputs).index_copy_(0, columns.index_K, grad_NK.sum(0))
    return dgrad_ND, wgrad, bias_grad


def _blocks(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, blocks: Blocks, needs: Needs
) -> Gradients:
    """Each kept block is one small product; those of a row (or column) of blocks are added up in index order."""
    (rows, columns), (high, wide) = blocks.block_shape, blocks.grid(grad_NO)
    down, across = blocks.index_K // wide, blocks.index_K % wide
    num_rows, num_outputs = grad_NO.shape
    padded = pad(grad_NO, (0, wide * columns - num_outputs, 0, high * rows - num_rows))
    grad = padded.view(high, rows, wide, columns)[down, :, across]  # (K, rows, columns)
    if blocks.weight_K is not None:
        grad = grad * blocks.weight_K.to(grad.dtype)[:, None, None]
    dgrad_ND = wgrad = bias_grad = None
    if weight is not None:
        weight_OD = pad(form.by_output(weight), (0, 0, 0, wide * columns - num_outputs)).view(wide, columns, -1)
        products = grad.bmm(weight_OD[across])
        dgrad = products.new_zeros(high, *products.shape[1:]).index_add_(0, down, products)
        dgrad_ND = dgrad.view(high * rows, -1)[:num_rows]
    if x_ND is not None:
        x = pad(x_ND, (0, 0, 0, high * rows - num_rows)).view(high, rows, -1)
        products = grad.mT.bmm(x[down])
        wgrad_OD = products.new_zeros(wide, *products.shape[1:]).index_add_(0, across, products)
        wgrad = form.by_output(wgrad_OD.view(wide * columns, -1)[:num_outputs])
    if needs.bias:
        sums = grad.sum(1)
        bias_grad = sums.new_zeros(wide, columns).index_add_(0, across, sums).flatten()[:num_outputs]
    return dgrad_ND, wgrad, bias_grad


def _elements(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, elements: Elements, needs: Needs
) -> Gradients | None:
    if not _csr_pays(grad_NO, elements):
        return None
    num_rows, num_outputs = grad_NO.shape
    index_K, order = elements.index_K.sort()
    value_K = elements.gather(grad_NO)[order]
    dgrad_ND = wgrad = bias_grad = None
    if weight is not None:
        dgrad_ND = _csr(index_K, value_K, num_rows, num_outputs) @ form.by_output(weight)
    if x_ND is not None:
        turned_K, turn = (index_K % num_outputs * num_rows + index_K // num_outputs).sort()
        wgrad = form.by_output(_csr(turned_K, value_K[turn], num_outputs, num_rows) @ x_ND)
    if needs.bias:
        bias_grad = value_K.new_zeros(num_outputs).index_add_(0, index_K % num_outputs, value_K)
    return dgrad_ND, wgrad, bias_grad


def _csr_pays(grad_NO: Tensor, elements: Elements) -> bool:
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    backed = grad_NO.is_cuda or (mkl and grad_NO.dtype in (torch.float32, torch.float64))
    return backed and elements.index_K.numel() < CSR_BELOW * grad_NO.numel()


def _csr(index_K: Tensor, value_K: Tensor, num_rows: int, num_columns: int) -> Tensor:
    row_K = index_K.div(num_columns, rounding_mode="floor")
    starts = torch.searchsorted(row_K, torch.arange(num_rows + 1, device=index_K.device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # PyTorch 2.11
        return torch.sparse_csr_tensor(
            starts, index_K % num_columns, value_K, (num_rows, num_columns), check_invariants=False
        )


def _two_to_four(
    form: Form, grad_NO: Tensor, x_ND: Tensor | None, weight: Tensor | None, selection: TwoToFour, needs: Needs
) -> Gradients | None:
    """dgrad on sparse tensor cores; wgrad sums over rows, where the pattern does not lie, and stays dense."""
    if weight is None or not _has_sparse_cores(grad_NO, weight):
        return None
    masked_NO = selection.apply(grad_NO).contiguous()  # the conversion takes nothing else
    dgrad_ND = torch.mm(torch.sparse.to_sparse_semi_structured(masked_NO), form.by_output(weight))
    wgrad = None if x_ND is None else form.wgrad(masked_NO, x_ND)
    return dgrad_ND, wgrad, masked_NO.sum(0) if needs.bias else None


def _has_sparse_cores(grad_NO: Tensor, weight: Tensor) -> bool:
    if not grad_NO.is_cuda or grad_NO.dtype not in (torch.float16, torch.bfloat16):
        return False
    fits = all(size % 64 == 0 for size in (*grad_NO.shape, *weight.shape))
    able = torch.cuda.get_device_capability(grad_NO.device) >= (8, 0) and torch.backends.cusparselt.is_available()
    return fits and able


_KERNELS: dict[type[Selection], Any] = {
    Rows: _rows,
    Columns: _columns,
    Blocks: _blocks,
    Elements: _elements,
    TwoToFour: _two_to_four,
}
