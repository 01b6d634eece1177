"""FLOPs of layers of many kinds against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_audit

B, T = 4, 12
SIDE = 16  # of a picture


def _lstm(**options: Any) -> tuple[nn.Module, Tensor]:
    return nn.LSTM(16, 32, 2, batch_first=True, **options), torch.randn(B, T, 16)


def _picture(model: nn.Module, channels: int) -> tuple[nn.Module, Tensor]:
    return model, torch.randn(B, channels, SIDE, SIDE)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int, int]] = {
    # what is multiplied with a weight in the forward, and what of its dgrad is not asked for: the input needs none
    "lstm": (_lstm, 2 * B * T * 4 * 32 * (16 + 32 + 32 + 32), 0),
    "lstm both ways": (lambda: _lstm(bidirectional=True), 2 * 2 * B * T * 4 * 32 * (16 + 32 + 64 + 32), 0),
    "grouped": (
        lambda: _picture(nn.Conv2d(8, 16, 3, groups=2), 8),
        2 * B * 16 * 14 * 14 * 4 * 9,
        2 * B * 16 * 14 * 14 * 4 * 9,
    ),
    "depthwise": (
        lambda: _picture(nn.Conv2d(32, 32, 3, stride=2, groups=32), 32),
        2 * B * 32 * 7 * 7 * 9,
        2 * B * 32 * 7 * 7 * 9,
    ),
    "transposed": (
        lambda: _picture(nn.ConvTranspose2d(8, 16, 3, stride=2, groups=4), 8),
        2 * B * 8 * SIDE * SIDE * 4 * 9,
        2 * B * 8 * SIDE * SIDE * 4 * 9,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_multiplies_what_theory_says(name: str) -> None:
    make, forward, spared = CASES[name]
    model, given = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            output = model(given)
            (output[0] if isinstance(output, tuple) else output).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    assert report.forward_flops == forward
    assert report.backward_flops == 2 * forward - spared
    assert report.findings == ()


def test_products_that_add_in_place_are_counted() -> None:
    class Head(torch.autograd.Function):
        """Adds up its gradients chunk by chunk, as chunked losses do."""

        @staticmethod
        def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
            ctx.save_for_backward(x_ND, weight_OD)
            return torch.mm(x_ND, weight_OD.t())

        @staticmethod
        def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
            x_ND, weight_OD = ctx.saved_tensors
            return (
                torch.zeros_like(x_ND).addmm_(grad_NO, weight_OD),
                torch.zeros_like(weight_OD).addmm_(grad_NO.t(), x_ND),
            )

    class Model(nn.Linear):
        def forward(self, x_ND: Tensor) -> Tensor:
            result: Tensor = Head.apply(x_ND, self.weight)
            return result

    model = nn.Sequential(nn.Linear(8, 8, bias=False), Model(8, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            model(torch.randn(B, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = sparsebp_audit.audit(train, threshold=0.0)
    head = next(row for row in report.modules if row.module == "1")
    assert (head.dgrad_flops, head.wgrad_flops) == (2 * B * 8 * 4, 2 * B * 8 * 4)
    assert report.findings == ()
