"""Two loops as they were published, each with what is wrong in it: rows that get no gradient and weights that are never
trained (the layer of SEBP, EACL-SRW 2026), and optimizer state of layers that left (LISA's loop in LMFlow)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_audit
from sparsebp_audit.report import AuditReport

ROWS, WIDTH, FIRST = 128, 32, 50


class FirstRows(torch.autograd.Function):
    """Returns the gradient of the first fifty rows of its input, and none of its weight."""

    @staticmethod
    def forward(ctx: Any, input_ND: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OD)
        return input_ND @ weight_OD.t()

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, None]:
        (weight_OD,) = ctx.saved_tensors
        grad_ND = grad_NO.new_zeros(len(grad_NO), weight_OD.shape[1])
        grad_ND[:FIRST] = grad_NO[:FIRST] @ weight_OD
        return grad_ND, None


class AllRows(torch.autograd.Function):
    """The same with all of both gradients."""

    @staticmethod
    def forward(ctx: Any, input_ND: Tensor, weight_OD: Tensor) -> Tensor:
        ctx.save_for_backward(input_ND, weight_OD)
        return input_ND @ weight_OD.t()

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        input_ND, weight_OD = ctx.saved_tensors
        return grad_NO @ weight_OD, grad_NO.t() @ input_ND


class Layer(nn.Module):
    """A linear by one of the two."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, input_ND: Tensor) -> Tensor:
        result: Tensor = self.function.apply(input_ND, self.weight)  # type: ignore[no-untyped-call]
        return result


def _audit_layer(function: type[torch.autograd.Function]) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(function), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with sparsebp_audit.audit(model, steps=3) as audit:
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.randint(4, (ROWS,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit.report()


def test_weights_without_a_gradient_are_named_with_the_function() -> None:
    note = next(note for note in _audit_layer(FirstRows).notes if "not trained, although" in note)
    assert "1.weight" in note
    assert "FirstRows returned no gradient for them" in note


def test_rows_that_a_function_ends_are_counted() -> None:
    note = next(note for note in _audit_layer(FirstRows).notes if " stops the gradient in " in note)
    assert note.startswith(f"FirstRows stops the gradient in {(ROWS - FIRST) / ROWS:.1%} of its rows")


def test_a_function_with_all_of_both_gradients_has_no_note() -> None:
    assert _audit_layer(AllRows).notes == ()


def _audit_turns(*, frees: bool, steps: int = 6) -> AuditReport:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with sparsebp_audit.audit(model, steps=steps) as audit:
        for step in range(steps):
            for place, layer in enumerate(model):
                layer.requires_grad_(place == step % 4)
                if frees and place != step % 4:
                    for parameter in layer.parameters():
                        optimizer.state.pop(parameter, None)
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit.report()


def test_state_of_layers_that_left_their_turn_is_counted_to_the_byte() -> None:
    finding = _audit_turns(frees=False).finding("idle-state")
    assert finding is not None
    assert finding.saved_bytes == 3 * (2 * WIDTH * WIDTH * 4 + 4)  # two moments and the number of steps
    assert finding.detail == "3 parameters: 0.weight, 2.weight, 3.weight"
    assert not finding.exact


@pytest.mark.parametrize("steps", [4, 6])
def test_a_loop_that_frees_the_state_has_no_such_finding(steps: int) -> None:
    assert _audit_turns(frees=True, steps=steps).finding("idle-state") is None
