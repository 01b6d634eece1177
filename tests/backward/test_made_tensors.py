"""Which tensors a backward makes: on a CPU each takes time to fill, and what rows save is lost by a few of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparsebp_cli as sbp
from sparsebp_cli.policy import GradientSelector, choice


class _Made(TorchDispatchMode):
    """The names of the operators that ran, and the number of entries of each new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operators.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.sizes.append(result.numel())
        return result


def _run(model: nn.Module, policies: Sequence[GradientSelector], x: Tensor, grad: Tensor) -> _Made:
    made = _Made()

    def backward(output: Tensor) -> None:
        with made:
            output.backward(grad)

    with sbp.attach(model, policies) as engine:
        engine.backward(model(x), backward)
    return made


def test_choosing_and_multiplying_rows_makes_no_tensor_of_the_gradients_size() -> None:
    model, x = nn.Linear(8, 24, bias=False), torch.randn(4, 100, 8, requires_grad=True)
    made = _run(model, [sbp.make_policy("topk", keep=0.1)], x, torch.randn(4, 100, 24))
    assert x.grad is not None
    assert 400 * 24 not in made.sizes
    assert made.sizes.count(400 * 8) == 1  # dgrad


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-5, 1.0, 1e10, 1e25])
@pytest.mark.parametrize("order", [1, 2])
def test_sizes_are_in_the_order_of_float64_at_every_scale(scale: float, order: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(9, 33, generator=generator).double() * torch.logspace(0, -1, 9)[:, None] * scale).float()
    for dim in (0, 1):
        exact = torch.linalg.vector_norm(x.double(), ord=order, dim=dim)
        assert choice.size(x, dim, order).argsort().tolist() == exact.argsort().tolist()
    blocks = torch.stack([block.double().norm(order) for block in x[:, :32].reshape(9, 4, 8).flatten(0, 1)])
    assert choice.block_size(x[:, :32], (1, 8), order).flatten().argsort().tolist() == blocks.argsort().tolist()
