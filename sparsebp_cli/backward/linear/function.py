"""The backward of a linear layer that multiplies only what was selected.

``dgrad`` is the gradient of the input, ``wgrad`` that of the weight. The dense path makes the very calls that PyTorch's
own backward makes, in its order, so that the bits are the same. Each fast kernel equals the dense path on
``selection.apply(grad_NO)``.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.linear.kernel import Needs, kernel_share, run_kernel
from sparsebp_cli.policy import Selection


class Decider(Protocol):
    """Who is asked what to keep: a site of the engine."""

    @property
    def form(self) -> Form:
        """How the layer multiplies."""

    @property
    def reference(self) -> bool:
        """Whether selections are carried out by masking, then multiplying densely."""

    def decide(
        self, grad_NO: Tensor, batch_shape: torch.Size, num_inputs: int, needs: Needs
    ) -> tuple[Tensor, Selection | None]:
        """Return the gradient to go on with, and what is kept of it; None for all of it."""


class Form(ABC):
    """How a linear layer stores its weight and multiplies.

    Args:
        output_dim: The dimension of the weight that is O.
        replaces: Whether the layer is run in this way also where no policy is in force, with the same numbers.
    """

    output_dim: int
    replaces: ClassVar[bool] = False

    def apply(self, module: nn.Module, x: Tensor, decider: Decider) -> Tensor:
        """Run the layer so that its backward asks what to keep."""
        weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
        if torch.is_autocast_enabled(x.device.type):
            # Here and not in the Function, so that autograd records the casts and returns gradients in full precision.
            x, weight, bias = (_autocast(t) for t in (x, weight, bias))  # type: ignore[assignment]
        return cast("Tensor", SelectedLinear.apply(x, weight, bias, decider))  # type: ignore[no-untyped-call]

    def share(self, selection: type[Selection] | None, budget: float) -> float:
        """Return which share of the dense multiplications is left; see :func:`kernel_share`."""
        return kernel_share(selection, budget)

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, by the call that the module itself makes."""

    @abstractmethod
    def by_output(self, weight: Tensor) -> Tensor:
        """Return the weight as (O, D), without a copy."""

    @abstractmethod
    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        """Return the weight's gradient, laid out like the weight."""


@final
class LinearForm(Form):
    """``torch.nn.Linear``: the weight is (O, D)."""

    output_dim = 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def by_output(self, weight: Tensor) -> Tensor:
        return weight

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return grad_NO.t().mm(x_ND)


@final
class Conv1DForm(Form):
    """``transformers`` ``Conv1D``: the weight is (D, O)."""

    output_dim = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None, "Conv1D always has a bias"
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.t()

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return x_ND.t().mm(grad_NO)


@final
class MatmulForm(Form):
    """A subclass of ``torch.nn.Linear`` that adds its bias after the product, as Falcon's: the weight is (O, D)."""

    output_dim = 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = x @ weight.T
        return output if bias is None else output + bias

    def by_output(self, weight: Tensor) -> Tensor:
        return weight

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return grad_NO.t().mm(x_ND)


@final
class SelectedLinear(Function):
    """A linear layer whose backward asks what to keep. Saves the input only for wgrad and the weight only for dgrad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, decider: Decider) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.decider, ctx.input_shape = decider, x.shape
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        ctx.order = _order(decider.form, x, frozen=not needs_wgrad)
        ctx.save_for_backward(x if needs_wgrad else None, weight if needs_dgrad else None)
        # Detached, since autograd forbids to change a view made in here in place, and some linears return one.
        return decider.form.forward(x, weight, bias).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        decider, needs = ctx.decider, Needs(*ctx.needs_input_grad[:3])
        grad_NO = grad.reshape(-1, grad.shape[-1])
        x_ND = None if x is None else x.reshape(-1, x.shape[-1])
        shown_NO = grad_NO
        grad_NO, selection = decider.decide(shown_NO, grad.shape[:-1], ctx.input_shape[-1], needs)
        if selection is not None:
            gradients = None
            if not decider.reference:
                gradients = run_kernel(decider.form, grad_NO, x_ND, weight, selection, needs)
            if gradients is not None:
                dgrad_ND, wgrad, bias_grad = gradients
                return None if dgrad_ND is None else dgrad_ND.view(ctx.input_shape), wgrad, bias_grad, None
            grad_NO = selection.apply(grad_NO)
        if grad_NO is not shown_NO:  # else as it lies in memory, since that orders the sums
            grad = grad_NO.view(grad.shape)
        dgrad = None if weight is None else _dense_dgrad(grad, decider.form.by_output(weight), ctx.order)
        wgrad = None if x_ND is None else decider.form.wgrad(grad_NO, x_ND)
        bias_grad = _dense_bias_grad(grad, ctx.order) if needs.bias else None
        return None if dgrad is None else dgrad.view(ctx.input_shape), wgrad, bias_grad, None


class _Order(NamedTuple):
    """In which order PyTorch multiplies and adds, for the way that an input lies in memory."""

    dgrad: Literal["rows", "columns", "batched"] = "rows"
    flat_bias: bool = True


def _order(form: Form, x: Tensor, *, frozen: bool) -> _Order:
    if x.is_contiguous():
        return _Order(flat_bias=not isinstance(form, MatmulForm))
    flat_bias = x.dim() == 2 or isinstance(form, Conv1DForm)  # else the bias is added after the product
    folds = all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
    if not folds:
        return _Order("batched" if frozen else "rows", flat_bias)
    x_ND = x.view(-1, x.shape[-1])
    by_columns = x_ND.stride(0) == 1 and x_ND.stride(1) == x_ND.shape[0]
    return _Order("columns" if by_columns else "rows", flat_bias)


def _dense_dgrad(grad: Tensor, weight_OD: Tensor, order: _Order) -> Tensor:
    grad_NO = grad.reshape(-1, grad.shape[-1])
    if order.dgrad == "columns":
        return weight_OD.t().mm(grad_NO.t()).t()
    if order.dgrad == "batched":
        grad_BTO = grad.reshape(-1, *grad.shape[-2:])
        return grad_BTO.bmm(weight_OD.expand(len(grad_BTO), -1, -1))
    return grad_NO.mm(weight_OD)


def _dense_bias_grad(grad: Tensor, order: _Order) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0) if order.flat_bias else grad.sum_to_size(grad.shape[-1:])


def _autocast(tensor: Tensor | None) -> Tensor | None:
    # What autocast itself does to the arguments of a linear: floating, not double. It also caches the cast of a weight,
    # so that a layer used twice adds its gradients up in low precision; here they add up in full precision.
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
