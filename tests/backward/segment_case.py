"""Models and steps that segments are held against plain autograd on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sparsebp_cli as sbp

from .conftest import tokens
from .families import tiny_decoder

NUM_LAYERS = 5
ROWS = sbp.make_policy("random", keep=0.25, along="rows", weighted=True)
Gradients = dict[str, Tensor | None]


def make_model(family: str = "llama", **options: Any) -> nn.Module:
    number = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny_decoder(family, **{number: NUM_LAYERS}, **options)


def loss_of(model: nn.Module, number: int = 0, **inputs: Any) -> Tensor:
    ids = tokens(number)
    return model(input_ids=ids, labels=ids, **inputs).loss


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(one: Gradients, other: Gradients) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        assert (grad is None) == (other[name] is None), name
        assert grad is None or torch.equal(grad, other[name]), name


def run(
    model: nn.Module, policies: Any = None, loss: Callable[[nn.Module], Tensor] = loss_of, **options: Any
) -> Gradients:
    """Return the gradients of one backward; without policies and options, those of plain autograd."""
    torch.manual_seed(1)
    if policies is None and not options:
        loss(model).backward()
    else:
        with sbp.attach(model, policies or [], seed=3, **options) as engine:
            engine.backward(loss(model))
    found = gradients_of(model)
    model.zero_grad()
    return found


class Recurrent(nn.Module):
    """A stack that shares all its weights; every step reads another input, which is trained as well."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        cell = Cell()
        self.steps = nn.ModuleList([cell] * length)
        self.inputs = nn.ParameterList(torch.randn(4, 8) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for step, extra in zip(self.steps, self.inputs, strict=True):
            x = step(x, extra=extra)
        return x.square().sum()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x) + extra))


def recurrent_loss(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 32).view(4, 8))
