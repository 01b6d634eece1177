"""Describe how linears that can be trained in part store their weight and multiply.

Shape letters: N rows, D input width, O output width.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


class WeightLayout(ABC):
    """How a linear stores its weight and multiplies."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, by the same call that the module itself makes."""

    def by_output(self, weight: Tensor) -> Tensor:
        """Return the weight as (O, D), without a copy."""
        return weight

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        """Return the weight's gradient in the layout of the weight."""
        return grad_NO.t().mm(x_ND)


@final
class LinearLayout(WeightLayout):
    """``torch.nn.Linear``: the weight is (O, D)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)


@final
class Conv1DLayout(WeightLayout):
    """``transformers`` ``Conv1D``: the weight is (D, O)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None, "Conv1D always has a bias"
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.t()

    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        return x_ND.t().mm(grad_NO)


@final
class MatmulLayout(WeightLayout):
    """A subclass of ``torch.nn.Linear`` that adds its bias after the product, such as Falcon's."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = x @ weight.T
        return output if bias is None else output + bias


def find_layout(module: nn.Module) -> WeightLayout | None:
    """Return a linear's layout; None for other modules, and for quantised, sharded, float8 or parametrized linears."""
    # A subclass may compute something else, as quantised and float8 ones do. Our backward fits only this forward.
    layout = next((form for kind, form in _known() if type(module).forward is kind.forward), None)
    return layout if layout is not None and _is_plain(module) else None


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear; ``nn.Module`` may declare it as any tensor or module."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _known() -> list[tuple[type[nn.Module], WeightLayout]]:
    known: list[tuple[type[nn.Module], WeightLayout]] = [(nn.Linear, LinearLayout())]
    # Models that contain one have already imported it.
    if (conv1d := sys.modules.get("transformers.pytorch_utils")) is not None:
        known.append((conv1d.Conv1D, Conv1DLayout()))
    if (falcon := sys.modules.get("transformers.models.falcon.modeling_falcon")) is not None:
        known.append((falcon.FalconLinear, MatmulLayout()))
    return known


def _is_plain(module: nn.Module) -> bool:
    """Return whether a linear's weight is an ordinary real tensor, or a FakeTensorMode tensor without data."""
    if is_parametrized(module):  # reading its weight would compute it
        return False
    weight = weight_of(module)
    is_ordinary = type(weight.data) is Tensor or hasattr(weight.data, "fake_mode")
    return is_ordinary and not weight.is_complex() and weight.numel() > 0
