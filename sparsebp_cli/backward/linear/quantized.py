"""Linears with quantised, frozen weights: bitsandbytes' 4-bit and torchao's 8-bit linears.

The forward is the library's own call. The backward restores the quantised weight for dgrad, the only product of a
frozen weight. A selection drops rows of this product, but the restoring is always complete. With 4 bits, results are
bit-identical to bitsandbytes'. With 8 bits, torchao 0.18 leaves the backward to autograd, which saves a copy of each
weight in full precision. This module saves no copy, and the gradient is equal up to rounding.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.function import SelectedLinear, SelectionSource, WeightLayout
from sparsebp_cli.policy import Saved


class QuantizedLayout(WeightLayout):
    """A linear with a quantised weight, whose restored form is (O, D)."""

    output_dim = 0
    is_quantized = True

    def __init__(self, module: Any) -> None:
        self.module = module

    def apply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, decider: SelectionSource, saved: Saved | None = None
    ) -> Tensor:
        # Cast outside of the Function, like the library's module, so that autograd records the casts.
        dtype = self.find_dtype(x)
        bias = None if bias is None else bias.to(dtype)
        output: Tensor = SelectedLinear.apply(x.to(dtype), weight, bias, decider, saved)  # type: ignore[no-untyped-call]
        return output.to(x.dtype)

    def by_output(self, weight: Tensor) -> Tensor:
        return weight  # restored before

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> NoReturn:  # noqa: ARG002 - of the contract
        raise AssertionError("a quantised weight is frozen")

    @abstractmethod
    def find_dtype(self, x: Tensor) -> torch.dtype:
        """Return the type in which the module multiplies an input."""

    @abstractmethod
    def parts(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the weight."""


@final
class FourBitLayout(QuantizedLayout):
    """``bitsandbytes.nn.Linear4bit``: the weight is a column of bytes, with separate scales."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        # Without this, on a CPU with bfloat16 units, a forward in eval mode repacks the weight for inference. It then
        # multiplies in another precision, and no longer has a backward.
        module.support_avx512bf16_for_cpu = False

    @property
    def state(self) -> Any:
        """The scales, the code and the shape."""
        return self.module.weight.quant_state  # weights from saved-tensor hooks lack this state

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from bitsandbytes import matmul_4bit

        output: Tensor = matmul_4bit(x, weight, bias=bias, quant_state=self.state)
        return output

    def sizes(self, weight: Tensor) -> tuple[int, int]:  # noqa: ARG002 - its own shape is that of the bytes
        num_outputs, num_inputs = self.state.shape
        return num_outputs, num_inputs

    def restore(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        restored: Tensor = dequantize_4bit(weight.detach().view(-1, 1), self.state)
        return restored.to(dtype)

    def find_dtype(self, x: Tensor) -> torch.dtype:
        if not self.module.compute_type_is_set:
            self.module.set_compute_type(x)
            self.module.compute_type_is_set = True
        return cast("torch.dtype | None", self.module.compute_dtype) or x.dtype

    def parts(self) -> Iterator[Tensor]:
        state = self.state
        nested = state.state2
        yield from (self.module.weight, state.absmax)
        if nested is not None:
            yield nested.absmax


@final
class EightBitLayout(QuantizedLayout):
    """``torch.nn.Linear`` with torchao's ``Int8Tensor`` as its weight, whose input stays in high precision."""

    replaces = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def sizes(self, weight: Tensor) -> tuple[int, int]:
        return weight.shape[0], weight.shape[1]

    def restore(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return cast("Tensor", cast("Any", weight).dequantize(dtype))

    def find_dtype(self, x: Tensor) -> torch.dtype:
        device = x.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def parts(self) -> Iterator[Tensor]:
        weight = self.module.weight
        yield from (weight.qdata, weight.scale)
        if weight.zero_point is not None:
            yield weight.zero_point


def find_layout(module: nn.Module) -> QuantizedLayout | None:
    """Return the layout of a linear with a frozen, quantised weight; None for any other module."""
    weight: Any = module._parameters.get("weight")  # noqa: SLF001 - a parametrized one is computed when it is read
    if weight is None or weight.requires_grad:
        return None
    four_bits = sys.modules.get("bitsandbytes.nn")  # loaded if the model contains one
    if four_bits is not None and type(module).forward is four_bits.Linear4bit.forward:
        state = getattr(weight, "quant_state", None)
        return None if state is None or getattr(state, "packing_format_for_cpu", False) else FourBitLayout(module)
    eight_bits = getattr(sys.modules.get("torchao.quantization"), "Int8Tensor", None)
    if eight_bits is None or type(module).forward is not nn.Linear.forward or type(weight.data) is not eight_bits:
        return None
    is_plain = weight.dim() == 2 and weight.act_quant_kwargs is None and weight.act_pre_scale is None
    return EightBitLayout(module) if is_plain else None


def find_quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedLayout]]:
    """Yield the linears of a model that are quantised, by name."""
    for name, module in model.named_modules():
        layout = find_layout(module)
        if layout is not None:
            yield name, layout


def count_parameters(model: nn.Module) -> int:
    """Return the number of a model's weights. A quantised weight counts its restored entries."""
    packed = {id(layout.module.weight): layout for _, layout in find_quantized(model)}
    total = 0
    for parameter in model.parameters():
        layout = packed.get(id(parameter))
        if layout is None:
            total += parameter.numel()
        else:
            num_outputs, num_inputs = layout.sizes(parameter)
            total += num_outputs * num_inputs
    return total
