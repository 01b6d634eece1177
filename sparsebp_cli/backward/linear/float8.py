"""torchao's float8 linears with a backward that computes and saves only needed tensors.

torchao 0.18's own backward always computes the gradients of weight and input, even if they are not needed. Its forward
saves the input in high precision even for a frozen weight. This module uses torchao's casts and products, so results
are bit-identical, but it skips unused products. If the weight's gradient reads the input under the same cast as the
forward (tensorwise scales), it saves that cast: one byte a number instead of two or four. Rowwise and other scales go
along another dimension, so it then saves the input itself.

This backward also runs while the engine is disabled, without decisions, so that the dense baseline does not include
torchao's unused products.

Shape letters: N rows (= B*T), D input width, O output width, K kept.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.linear.function import Needs, SelectionSource, WeightLayout
from sparsebp_cli.backward.linear.latest_input import LatestInput
from sparsebp_cli.policy import Rows, Saved, Selection, Split

CastInput = tuple[Tensor, Tensor, object]  # data, scale and metadata of a float8 tensor


def float8_class() -> type[nn.Linear] | None:
    """Return torchao's float8 linear class; None if nothing has imported it, so no model can contain one."""
    loaded = sys.modules.get("torchao.float8.float8_linear")
    return None if loaded is None else cast("type[nn.Linear]", loaded.Float8Linear)


def find_float8(model: nn.Module) -> str | None:
    """Return the name of the first float8 linear, or None."""
    kind = float8_class()
    if kind is None:
        return None
    return next((name for name, module in model.named_modules() if isinstance(module, kind)), None)


class _Casts(NamedTuple):
    """The cast of one operand of a product."""

    config: Any  # torchao's CastConfig
    role: object  # torchao's GemmInputRole
    dim: int  # the dimension of scales that are not tensorwise


@final
class Float8Layout(WeightLayout):
    """``torchao.float8`` ``Float8Linear``: the weight is (O, D), in high precision; products are in float8.

    ``shared`` caches the latest cast input, for linears of the model that read the same input.
    """

    output_dim = 0
    replaces = True

    def __init__(self, module: Any, shared: LatestInput[CastInput]) -> None:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        self._wrapper: Any = Float8TrainingTensor
        self._shared = shared
        self.config, self.products = module.config, module.linear_mm_config
        config, role = module.config, GemmInputRole
        self.input = _Casts(config.cast_config_input, role.INPUT, -1)
        self.weight_t = _Casts(config.cast_config_weight, role.WEIGHT, 0)
        self.grad = _Casts(config.cast_config_grad_output, role.GRAD_OUTPUT, -1)
        self.weight_for_dgrad = _Casts(config.cast_config_weight_for_grad_input, role.WEIGHT, -1)
        self.grad_for_wgrad = _Casts(config.cast_config_grad_output_for_grad_weight, role.GRAD_OUTPUT, 0)
        self.input_for_wgrad = _Casts(config.cast_config_input_for_grad_weight, role.INPUT, 0)

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, decider: SelectionSource, saved: Saved | None = None
    ) -> Tensor:
        assert saved is None, "attach should have refused it"
        # Like torchao's forward, which reads CUDA's autocast state on every device.
        if torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        return cast("Tensor", _Float8Product.apply(x, weight, bias, decider))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply(self.cast(x, self.input), weight, bias)

    def by_output(self, weight: Tensor) -> Tensor:
        return weight

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        grad8_NO, x8_ND = self.cast(grad_NO, self.grad_for_wgrad), self.cast(x_ND, self.input_for_wgrad)
        return torch.mm(grad8_NO.t(), x8_ND)

    def share(self, selection: type[Selection] | None, budget: float) -> float:
        return budget if selection is Rows and self.rows_are_independent else 1.0

    @property
    def rows_are_independent(self) -> bool:
        """Whether omitting rows of the gradient leaves the cast of the other rows unchanged."""
        return self.is_same_cast(self.grad, self.grad_for_wgrad) and self.is_same_cast(self.input, self.input_for_wgrad)

    def is_same_cast(self, one: _Casts, other: _Casts) -> bool:
        """Return whether two casts of a tensor are equal: same settings, dynamic, with one scale for the whole
        tensor.
        """
        from torchao.float8.config import ScalingGranularity, ScalingType

        dynamic = one.config.scaling_type is ScalingType.DYNAMIC
        return (
            one.config == other.config and dynamic and one.config.scaling_granularity is ScalingGranularity.TENSORWISE
        )

    def cast(self, tensor: Tensor, casts: _Casts) -> Tensor:
        """Cast a tensor for a product, by torchao's own function."""
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

        if casts.config.scaling_type is ScalingType.DISABLED:
            return tensor
        found: Tensor = hp_tensor_to_float8_dynamic(
            tensor,
            casts.config.target_dtype,
            self.products,
            gemm_input_role=casts.role,
            scaling_granularity=casts.config.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(casts.dim, casts.config.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return found

    def multiply(self, x8: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output for an input that is cast already."""
        output = torch.mm(x8.reshape(-1, x8.shape[-1]), self.cast(weight.t(), self.weight_t))
        output = output.reshape(*x8.shape[:-1], output.shape[-1])
        return output if bias is None else output + bias.to(output.dtype)

    def cast_input(self, x: Tensor) -> CastInput:
        """Return data, scale and metadata of the float8 input, cached if the previous linear cast the same input."""
        how = (self.input.config, self.products, self.config.round_scales_to_power_of_2)
        return self._shared.of(x, lambda: self.unwrap(self.cast(x, self.input)), how)

    def unwrap(self, x8: Tensor) -> CastInput:
        """Return data, scale and metadata of a float8 tensor."""
        (data, scale), rest = cast("Any", x8).__tensor_flatten__()
        return getattr(x8, data), getattr(x8, scale), rest

    def wrap(self, data: Tensor, scale: Tensor, rest: object) -> Tensor:
        """Return the float8 tensor with the given data, scale and metadata."""
        inner: Tensor = self._wrapper.__tensor_unflatten__({"_data": data, "_scale": scale}, rest, None, None)
        return inner


@final
class _Float8Product(Function):
    """The layer, including its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, decider: SelectionSource) -> Tensor:
        ctx.set_materialize_grads(False)
        form = decider.form
        assert isinstance(form, Float8Layout)
        ctx.decider, ctx.input_shape, ctx.rest = decider, x.shape, None
        ctx.bias_dtype = None if bias is None else bias.dtype
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        kept = scale = None
        if needs_wgrad and x.is_contiguous() and form.is_same_cast(form.input, form.input_for_wgrad):
            kept, scale, ctx.rest = form.cast_input(x)
            x8 = form.wrap(kept, scale, ctx.rest)
        else:
            x8, kept = form.cast(x, form.input), x if needs_wgrad else None
        ctx.save_for_backward(kept, scale, weight if needs_dgrad else None)
        return form.multiply(x8, weight, bias).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        (kept, scale, weight), decider = ctx.saved_tensors, ctx.decider
        form, needs = decider.form, Needs(*ctx.needs_input_grad[:3])
        assert isinstance(form, Float8Layout)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        selection = decider.decide(grad_NO, grad.shape[:-1], ctx.input_shape[-1], needs)
        assert not isinstance(selection, Split), "attach should have refused it"
        rows = (
            selection if isinstance(selection, Rows) and not decider.reference and form.rows_are_independent else None
        )
        if selection is not None:
            grad_NO = selection.apply(grad_NO) if rows is None else rows.gather(grad_NO)
            grad = grad_NO if rows is not None else grad_NO.view(grad.shape)
        if kept is not None:
            kept = kept.reshape(-1, kept.shape[-1])
            kept = kept if rows is None else _take_rows(kept, rows.index_K)
        dgrad, wgrad = _products(form, grad_NO, kept, scale, ctx.rest, weight)
        if dgrad is not None and rows is not None:
            dgrad = dgrad.new_zeros(ctx.input_shape.numel() // dgrad.shape[1], dgrad.shape[1]).index_copy_(
                0, rows.index_K, dgrad
            )
        bias_grad = grad.sum_to_size(grad.shape[-1:]).to(ctx.bias_dtype) if needs.bias else None
        return None if dgrad is None else dgrad.view(ctx.input_shape), wgrad, bias_grad, None


def _products(
    form: Float8Layout,
    grad_NO: Tensor,
    kept_ND: Tensor | None,
    scale: Tensor | None,
    rest: object,
    weight: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    dgrad_ND = wgrad_OD = grad8_NO = None
    if weight is not None:
        grad8_NO = form.cast(grad_NO, form.grad)
        dgrad_ND = torch.mm(grad8_NO, form.cast(weight.t(), form.weight_for_dgrad).t())
    if kept_ND is not None:
        if grad8_NO is None or not form.is_same_cast(form.grad, form.grad_for_wgrad):
            grad8_NO = form.cast(grad_NO, form.grad_for_wgrad)
        x8_ND = form.cast(kept_ND, form.input_for_wgrad) if scale is None else form.wrap(kept_ND, scale, rest)
        wgrad_OD = torch.mm(grad8_NO.t(), x8_ND)
    return dgrad_ND, wgrad_OD


def _take_rows(kept_ND: Tensor, index_K: Tensor) -> Tensor:
    if kept_ND.element_size() > 1:
        return kept_ND.index_select(0, index_K)
    return kept_ND.view(torch.uint8).index_select(0, index_K).view(kept_ND.dtype)  # index_select has no float8 kernel
