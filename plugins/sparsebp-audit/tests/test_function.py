"""A Function that differentiates more than anybody asked for, in a plain PyTorch loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import sparsebp_audit
from sparsebp_audit.report import AuditReport

WIDTHS = (32, 64, 128, 64, 32)
N = 16


class Eager(torch.autograd.Function):
    """Multiplies for the weight whether or not it is trained, and saves the input for that."""

    @staticmethod
    def forward(ctx: Any, input_ND: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(input_ND, weight_OD)
        return input_ND @ weight_OD.t()

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        input_ND, weight_OD = ctx.saved_tensors
        return grad_NO @ weight_OD, (grad_NO.t() @ input_ND).clone()


class Asking(Eager):
    """Asks first."""

    @staticmethod
    def forward(ctx: Any, input_ND: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(input_ND if ctx.needs_input_grad[1] else None, weight_OD)
        return input_ND @ weight_OD.t()

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input_ND, weight_OD = ctx.saved_tensors
        return (
            grad_NO @ weight_OD if ctx.needs_input_grad[0] else None,
            grad_NO.t() @ input_ND if ctx.needs_input_grad[1] else None,
        )


class Layer(nn.Module):
    """A linear with an own Function; what comes in is halved first, so that its input is its own to keep."""

    def __init__(self, function: type[Eager], width: int, out: int, *, trained: bool) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(out, width) / width, requires_grad=trained)

    def forward(self, input_ND: Tensor) -> Tensor:
        result: Tensor = self.function.apply(input_ND * 0.5, self.weight)
        return result


def _audit(function: type[Eager], *, reads_input: bool = True, threshold: float = 0.0) -> AuditReport:
    torch.manual_seed(0)
    pairs = list(pairwise(WIDTHS))
    model = nn.Sequential(*(Layer(function, *pair, trained=place % 2 == 1) for place, pair in enumerate(pairs)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def train() -> None:
        for _ in range(3):
            input_ND = torch.randn(N, WIDTHS[0], requires_grad=True)
            model(input_ND).square().mean().backward()
            assert input_ND.grad is not None
            if reads_input:
                assert float(input_ND.grad.sum())
            optimizer.step()
            optimizer.zero_grad()

    return sparsebp_audit.audit(train, threshold=threshold)


def test_weight_gradients_of_frozen_weights_are_found_to_the_flop_and_to_the_byte() -> None:
    report = _audit(Eager)
    finding = report.finding("frozen-wgrad")
    assert finding is not None
    assert finding.flops == 2 * N * (32 * 64 + 128 * 64)  # of layers 0 and 2
    assert finding.saved_bytes == pytest.approx(4 * N * (32 + 128))  # their inputs, which nothing else reads
    assert finding.modules == ("2", "0")
    assert [other.kind for other in report.findings] == ["frozen-wgrad"]


def test_a_function_that_asks_first_has_no_waste() -> None:
    assert _audit(Asking).findings == ()


def test_the_gradient_of_an_input_that_nobody_reads_is_found() -> None:
    finding = _audit(Asking, reads_input=False).finding("unread-leaf")
    assert finding is not None
    assert finding.flops == 2 * N * (
        64 * 128 + 32 * 64
    )  # dgrad of layers 1 and 0: layer 1 is the lowest that is trained
    assert finding.modules == ("1", "0")


def test_a_dropped_gradient_of_no_parameter_is_named_as_such() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input_ND: Tensor, scale_DD: Tensor) -> Tensor:
            ctx.save_for_backward(input_ND, scale_DD)
            return input_ND @ scale_DD

        @staticmethod
        def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
            input_ND, scale_DD = ctx.saved_tensors
            return grad_ND @ scale_DD.t(), input_ND.t() @ grad_ND

    weight, scale_DD = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train() -> None:
        for _ in range(2):
            Twice.apply(torch.randn(4, 8) @ weight, scale_DD).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    finding = sparsebp_audit.audit(train, threshold=0.0).finding("dropped-gradient")
    assert finding is not None
    assert finding.flops == 2 * 4 * 8 * 8


def test_a_gradient_that_a_function_adds_somewhere_itself_is_used() -> None:
    main_DD = torch.zeros(8, 8)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input_ND: Tensor, weight_DD: Tensor) -> Tensor:
            ctx.save_for_backward(input_ND, weight_DD)
            return input_ND @ weight_DD

        @staticmethod
        def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
            input_ND, weight_DD = ctx.saved_tensors
            product_DD = input_ND.t() @ grad_ND
            main_DD.add_(product_DD)
            return grad_ND @ weight_DD.t(), product_DD

    first, frozen_DD = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    optimizer = torch.optim.SGD([first], lr=0.1)

    def train() -> None:
        for _ in range(2):
            Fused.apply(torch.randn(4, 8) @ first, frozen_DD).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert sparsebp_audit.audit(train, threshold=0.0).findings == ()
    assert float(main_DD.abs().sum()) > 0


def test_stock_float8_linears_compute_for_frozen_weights_and_keep_their_inputs() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(width, out, bias=False) for width, out in pairwise(WIDTHS)]
    linears[0].requires_grad_(False)
    linears[2].requires_grad_(False)
    model = convert_to_float8_training(nn.Sequential(*linears), config=Float8LinearConfig(emulate=True))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(torch.randn(N, WIDTHS[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    finding = report.finding("frozen-wgrad")
    assert finding is not None
    assert finding.flops == 2 * N * 128 * 64  # of layer 2; nothing below asks layer 0 for anything
    assert finding.saved_bytes == 4 * N * 128
    assert sum(row.forward_flops for row in report.modules) == 2 * N * sum(a * b for a, b in pairwise(WIDTHS))
