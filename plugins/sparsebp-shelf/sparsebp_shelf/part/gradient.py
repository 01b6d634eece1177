"""Compute a linear layer that trains only a part of its weight.

The part is a leaf of its own shape, so the optimizer's state has this shape too. The forward multiplies the whole
weight, which holds the same values; the leaf only receives the gradient. The reference computes the dense weight
gradient and restricts it.

Shape letters: N rows (= B*T), D input width, O output width, K kept, R features of the input that a part reads, S side
of a block.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_shelf.part.layout import WeightLayout
from sparsebp_shelf.part.weight_part import WeightBlocks, WeightColumns, WeightPart, WeightRows


@final
class PartLinear(Function):
    """Run a linear layer whose backward computes the weight's gradient for a part only.

    It saves only the input features that the part reads; rows and entries need all features.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        leaf: Tensor,  # noqa: ARG004  only receives the gradient
        weight: Tensor,
        bias: Tensor | None,
        form: WeightLayout,
        part: WeightPart,
        reference: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.part, ctx.reference, ctx.input_shape = form, part, reference, x.shape
        needs_dgrad, needs_part = ctx.needs_input_grad[:2]
        kept = x if needs_part else None
        columns_R = None if reference else _columns(part)
        if needs_part and columns_R is not None:
            kept = x.reshape(-1, x.shape[-1]).index_select(1, columns_R)
        ctx.save_for_backward(kept, weight if needs_dgrad else None)
        return form.forward(x, weight, bias).detach()  # some layouts return a view, which a Function must not return

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        kept, weight = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        dgrad = None if weight is None else grad_NO.mm(ctx.form.by_output(weight)).view(ctx.input_shape)
        part_grad = None
        if kept is not None:
            kept_NR = kept.reshape(-1, kept.shape[-1])
            part_grad = part_wgrad(ctx.form, ctx.part, grad_NO, kept_NR, reference=ctx.reference)
        bias_grad = grad_NO.sum(0) if ctx.needs_input_grad[3] else None
        return dgrad, part_grad, None, bias_grad, None, None, None


def part_wgrad(form: WeightLayout, part: WeightPart, grad_NO: Tensor, kept_NR: Tensor, *, reference: bool) -> Tensor:
    """Return the gradient of a part, in the shape of :meth:`~sparsebp_shelf.part.WeightPart.restrict`.

    ``kept_NR`` is the input, (N, D); for columns and blocks only the features that they read, unless ``reference``.
    """
    if not reference:
        if isinstance(part, WeightRows):
            return form.by_output(form.wgrad(grad_NO.index_select(1, part.index_K), kept_NR))
        if isinstance(part, WeightBlocks):
            return _block_wgrad(part, grad_NO, kept_NR)
        if isinstance(part, WeightColumns):
            return form.by_output(form.wgrad(grad_NO, kept_NR))
    return part.restrict(form.by_output(form.wgrad(grad_NO, kept_NR)))


def _block_wgrad(part: WeightBlocks, grad_NO: Tensor, kept_NR: Tensor) -> Tensor:
    """Return the gradients of blocks, (K, S, S): one product for each column of blocks."""
    size = part.size
    found = grad_NO.new_empty(len(part.index_K), size, size)
    for number, (places, row_features) in enumerate(part.by_column):
        column_NS = kept_NR[:, number * size : (number + 1) * size]
        found[places] = grad_NO.index_select(1, row_features).t().mm(column_NS).view(-1, size, size)
    return found


def _columns(part: WeightPart) -> Tensor | None:
    """Return the features of the input that a part reads, (R,); None if it reads all features."""
    if isinstance(part, WeightColumns):
        return part.index_K
    return part.read_columns if isinstance(part, WeightBlocks) else None


def run_part(
    module: nn.Module, x: Tensor, leaf: Tensor, form: WeightLayout, part: WeightPart, *, reference: bool
) -> Tensor:
    """Run a linear with a trained part, under autocast in its dtype; the leaf's gradient keeps the leaf's dtype."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if torch.is_autocast_enabled(x.device.type):
        x, leaf, weight, bias = _cast(x), _cast(leaf), _cast(weight), None if bias is None else _cast(bias)
    output: Tensor = PartLinear.apply(x, leaf, weight, bias, form, part, reference)  # type: ignore[no-untyped-call]
    return output


def _cast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast would pass it to a product."""
    # Autocast casts floating-point arguments except float64. It also caches a weight's cast, so a layer that runs twice
    # sums its gradients in low precision; this code sums them in full precision.
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
