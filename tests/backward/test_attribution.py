"""Nodes of the autograd graph are credited to the module that made them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from sparsebp_cli.backward.observe.attribution import Attribution
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import tiny_model, tokens


def _nodes(loss: Tensor) -> list[Node]:
    assert loss.grad_fn is not None
    found, waiting = {loss.grad_fn: None}, [loss.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return list(found)


def _multiplications(attribution: Attribution, loss: Tensor) -> dict[str | None, int]:
    count: dict[str | None, int] = {}
    for node in _nodes(loss):
        if node.name() in ("MmBackward0", "AddmmBackward0"):
            name = attribution.name_of(node)
            count[name] = count.get(name, 0) + 1
    return count


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_every_linear_owns_its_one_multiplication(family: str) -> None:
    """Also of modules that share an input, which torch's own counter mixes up."""
    model = tiny_model(family)
    attribution = Attribution(model)
    ids = tokens(0)
    loss = model(input_ids=ids, labels=ids).loss
    kinds = ("Linear", "Conv1D")
    linears = {name: 1 for name, module in model.named_modules() if type(module).__name__ in kinds}
    assert _multiplications(attribution, loss) == linears
    assert attribution.name_of(loss.grad_fn) == ""


@pytest.mark.model
def test_checkpointed_layers_are_credited_by_their_first_run() -> None:
    model, ids = tiny_model("llama"), tokens(0)
    checkpoint_activations(model)
    attribution = Attribution(model)
    before = _multiplications(attribution, model(input_ids=ids, labels=ids).loss)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert _multiplications(attribution, loss) == before
    assert len(before) == 2 * 7 + 1


def test_several_forwards_stay_known_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    attribution, x = Attribution(model), torch.ones(2, 3)
    first, outside, second = model(x).grad_fn, torch.ones(1, requires_grad=True).exp().grad_fn, model(x).grad_fn
    assert [attribution.name_of(node) for node in (first, outside, second)] == ["2", None, "2"]
    monkeypatch.setattr("sparsebp_cli.backward.observe.attribution.MOST_RECORDS", 40)
    for _ in range(20):
        last = model(x)
    assert [attribution.name_of(node) for node in (first, second, last.grad_fn)] == [None, None, "2"]


def test_an_error_in_a_forward_leaves_no_module_open() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("out of something")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    attribution = Attribution(model)
    with pytest.raises(ValueError, match="out of something"):
        model(torch.ones(1, 2))
    assert attribution.name_of(torch.ones(1, requires_grad=True).exp().grad_fn) is None


def test_only_the_outermost_output_is_watched() -> None:
    seen: list[Tensor] = []
    running: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    attribution = Attribution(model, at_exit=seen.append)
    model[1].register_forward_pre_hook(lambda *_: running.append(attribution.current))
    model(torch.ones(1, 2))
    model[0](torch.ones(1, 2))
    assert running == ["1"]
    assert attribution.current == ""
    assert [tuple(output.shape) for output in seen] == [(1, 3), (1, 2)]
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    attribution.remove()
    model[1]._forward_pre_hooks.clear()
    copy.deepcopy(model)
    model(torch.ones(1, 2))
    assert len(seen) == 2
