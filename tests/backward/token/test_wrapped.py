"""In what wraps a model: DDP, torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sparsebp_cli as sbp

from .case import Marked, make_batch, step
from .test_families import decoder

MODES: tuple[Any, ...] = ("exact", "detach")


@pytest.fixture
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def assert_gradients(model: nn.Module, expected: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_first", [False, True])
def test_ddp_may_wrap_before_and_after(mode: Any, *, is_first: bool) -> None:
    model = decoder("llama")
    for name in ("scattered", "prompts"):  # DDP waits in vain for a parameter without a gradient
        batch = make_batch(name)
        expected = step(model, batch, mode).gradients
        model.zero_grad(set_to_none=True)
        wrapped = nn.parallel.DistributedDataParallel(model) if is_first else None
        with sbp.attach(wrapped or model, [Marked(mode=mode)]) as engine:
            wrapped = wrapped or nn.parallel.DistributedDataParallel(model)
            engine.backward(wrapped(**batch.arguments).loss)
        assert_gradients(model, expected)


@pytest.mark.compiles
@pytest.mark.parametrize("way", ["before", "after", "branches"])
def test_a_compiled_model_selects_and_what_is_compiled_in_its_layers_stays_so(way: str) -> None:
    for mode in MODES:
        model, batch = decoder("llama"), make_batch("scattered")
        expected = step(model, batch, mode).gradients
        model.zero_grad(set_to_none=True)
        called: nn.Module = torch.compile(model, backend="eager") if way == "before" else model
        if way == "branches":
            for layer in model.model.layers:
                layer.mlp.compile(backend="eager")
        torch._dynamo.reset()  # else the limit of compilations of one piece of code is reached
        torch._dynamo.utils.counters.clear()
        with sbp.attach(called, [Marked(mode=mode)]) as engine:
            called = torch.compile(model, backend="eager") if way == "after" else called
            engine.backward(called(**batch.arguments).loss)
        assert_gradients(model, expected)
        if way == "branches":
            assert torch._dynamo.utils.counters["frames"]["ok"] > 0
