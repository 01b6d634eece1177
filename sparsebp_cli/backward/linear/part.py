"""A linear layer of which only rows or columns of the weight are trained.

The part is a leaf of its own shape, so that the optimizer's state has this shape too. The forward multiplies the whole
weight, which holds the same values; the leaf only receives the gradient. The reference computes the dense gradient of
the weight and restricts it.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.linear.function import WeightLayout, autocast
from sparsebp_cli.policy.part import WeightColumns, WeightPart, WeightRows


@final
class PartLinear(Function):
    """A linear layer whose backward computes the weight's gradient for a part only.

    It saves the whole input for rows, and the part's features of it for columns.
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
        if needs_part and isinstance(part, WeightColumns) and not reference:
            kept = part.restrict(x.reshape(-1, x.shape[-1]))
        ctx.save_for_backward(kept, weight if needs_dgrad else None)
        return form.forward(x, weight, bias).detach()  # some layouts return a view, which must not leave a Function

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
            kept_ND = kept.reshape(-1, kept.shape[-1])
            part_grad = part_wgrad(ctx.form, ctx.part, grad_NO, kept_ND, reference=ctx.reference)
        return dgrad, part_grad, None, None, None, None, None


def part_wgrad(form: WeightLayout, part: WeightPart, grad_NO: Tensor, kept: Tensor, *, reference: bool) -> Tensor:
    """Return the gradient of a part, (K, D) or (O, K).

    ``kept`` is the input (N, D); for columns, unless ``reference``, the part's features of it, (N, K).
    """
    if reference:
        return part.restrict(form.by_output(form.wgrad(grad_NO, kept)))
    if isinstance(part, WeightRows):
        grad_NO = grad_NO.index_select(1, part.index_K)
    return form.by_output(form.wgrad(grad_NO, kept))


def run_part(
    module: nn.Module, x: Tensor, leaf: Tensor, form: WeightLayout, part: WeightPart, *, reference: bool
) -> Tensor:
    """Run a linear of which a part is trained; under autocast in its dtype, with the leaf's gradient in the leaf's."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if torch.is_autocast_enabled(x.device.type):
        x, leaf, weight, bias = autocast(x), autocast(leaf), autocast(weight), None if bias is None else autocast(bias)
    output: Tensor = PartLinear.apply(x, leaf, weight, bias, form, part, reference)  # type: ignore[no-untyped-call]
    return output
