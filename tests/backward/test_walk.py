"""The walk is PyTorch's own backward in Python: its bits, its memory, and what it refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError

from .conftest import tokens
from .families import tiny_decoder


def _walk(model: nn.Module, loss: Callable[[], Tensor], backward: Any = None) -> list[Tensor | None]:
    with sbp.attach(model, [], sites="nodes", execution="reference") as engine:
        engine.backward(loss(), backward)
    return _take(model)


def _take(model: nn.Module) -> list[Tensor | None]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def _assert_same(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    loss().backward()
    plain, ours = _take(model), _walk(model, loss)
    assert [grad is None for grad in plain] == [grad is None for grad in ours]
    for a, b in zip(plain, ours, strict=True):
        assert a is None or (a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b))
    return plain


class Odd(Function):
    """Arguments that are no tensors between those that are, one of them frozen; two outputs, one of them unused."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, label: str, frozen: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, frozen)
        ctx.factor = factor
        return x * factor + y, x * frozen

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        x, frozen = ctx.saved_tensors
        assert second.shape == x.shape  # zeros, where nothing arrived
        return None, first * ctx.factor + second * frozen, None, None, first


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
        self.low = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.idle = nn.Parameter(torch.randn(4))

    def forward(self, both: bool = False) -> Tensor:
        first, second = Odd.apply(2.0, self.x, "label", torch.full((3, 4), 0.5), self.y.expand(3, 4))
        total = (first * self.low).square().sum() + self.y.exp().mean()  # broadcast, and cast on the way
        return total + second.sum() if both else total


@pytest.mark.parametrize("both", [False, True])
def test_functions_of_python_broadcasts_and_casts_are_plain_pytorch(both: bool) -> None:
    model = Mixed()
    plain = _assert_same(model, lambda: model(both))
    assert plain[3] is None
    assert plain[2].dtype == torch.bfloat16


def test_outputs_of_one_node_used_more_than_once_add_up_in_the_engines_order() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(6, 5))

        def forward(self) -> Tensor:
            a, b, _ = self.weight.split(2)
            return (a * 0.1 + a.exp() + b * a).sum() / 3 + (a @ b.t()).tanh().sum() * 0.7

    model = Parts()
    _assert_same(model, model)


def test_autocast_and_frozen_parts_are_plain_pytorch() -> None:
    model, ids = tiny_decoder("qwen2"), tokens(0)
    model.model.layers[0].requires_grad_(False)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    _assert_same(model, loss)


def test_gradients_accumulate_and_hooks_after_accumulation_run() -> None:
    model, seen = tiny_decoder("llama"), []
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    losses = [lambda number=number: model(input_ids=tokens(number), labels=tokens(number)).loss for number in range(2)]
    for loss in losses:
        loss().backward()
    plain, plain_seen = _take(model), list(seen)
    seen.clear()
    with sbp.attach(model, [], sites="nodes", execution="reference") as engine:
        for loss in losses:
            engine.backward(loss())
    assert all(torch.equal(a, b) for a, b in zip(plain, _take(model), strict=True))
    assert len(seen) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain_seen, seen, strict=True))


def test_whoever_runs_the_pass_may_scale_the_loss() -> None:
    model, ids = tiny_decoder("llama"), tokens(0)

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    (loss() * 0.3).backward()
    plain = _take(model)
    ours = _walk(model, loss, lambda loss: (loss * 0.3).backward())
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


class Held(Function):
    """Saves a tensor that nobody else has."""

    held: weakref.ref[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mine = x.clone()
        Held.held = weakref.ref(mine)
        ctx.save_for_backward(mine)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def test_what_was_saved_is_released_while_the_loss_lives() -> None:
    model = nn.ParameterList([torch.ones(4)])
    with sbp.attach(model, [], sites="nodes", execution="reference") as engine:
        loss = (model[0] * 2.0).sin().sum()
        sine = loss.grad_fn.next_functions[0][0]
        assert sine._saved_self is not None
        engine.backward(loss)
        with pytest.raises(TypeError, match="expected to be a Tensor but got result of type NoneType"):
            _ = sine._saved_self
        with pytest.raises(UsageError, match="has already run and released its graph"):
            engine.backward(loss)
        loss = Held.apply(model[0]).sum()
        assert Held.held() is not None
        engine.backward(loss)
        assert Held.held() is None


def test_hooks_that_would_be_left_out_are_refused_by_name() -> None:
    model, ids = tiny_decoder("llama"), tokens(0)
    with sbp.attach(model, [], sites="nodes", execution="reference") as engine:
        for register, name in (
            (lambda: model.model.norm.register_full_backward_hook(lambda *_: None), "model.norm"),
            (lambda: model.model.norm.register_full_backward_pre_hook(lambda *_: None), "model.norm"),
            (lambda: model.lm_head.weight.register_hook(lambda grad: grad), "lm_head.weight"),
        ):
            handle = register()
            with pytest.raises(UnsupportedError, match=f"runs no backward hooks: remove the hook of '{name}'"):
                engine.backward(model(input_ids=ids, labels=ids).loss)
            handle.remove()
        engine.backward(model(input_ids=ids, labels=ids).loss)


@pytest.mark.compiles
def test_a_compiled_model_is_refused_by_name() -> None:
    class Model(nn.Linear):
        def forward(self, x_NI: torch.Tensor) -> torch.Tensor:  # its own code: dynamo remembers what it left out
            return super().forward(x_NI).tanh()

    model = Model(2, 2)
    compiled = torch.compile(model, backend="aot_eager")
    with (
        sbp.attach(model, [], sites="nodes", execution="reference") as engine,
        pytest.raises(UnsupportedError, match=r"torch.compile; leave the model uncompiled"),
    ):
        engine.backward(compiled(torch.ones(1, 2)).sum())
