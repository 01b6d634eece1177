"""FLOPs and saved bytes by module: held against hand calculation, in forward, backward and what is run again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

import sparsebp_cli as sbp
from sparsebp_cli.backward import FlopCount, ModuleTrace, SavedBytes, count_flops, saved_bytes
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.policy import Elements
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.selector import Given

from .conftest import tiny_model, tokens
from .families import DECODERS, tiny_decoder

B, T = 2, 16
N = B * T


def _run(model: Any, backward: Any = None) -> tuple[FlopCount, SavedBytes]:
    ids = tokens(0)
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        with saved_bytes(model.parameters(), trace) as saved:
            loss = model(input_ids=ids, labels=ids).loss
        (backward or torch.Tensor.backward)(loss)
    return flops, saved


def _products(model: nn.Module) -> Counter[str]:
    """2 N D O of each linear."""
    linears = find_linears(model).covered
    assert linears
    return Counter({name: 2 * N * module.weight.numel() for name, module, _ in linears})  # type: ignore[union-attr, operator]


def _of_linears(count: Counter[str], model: nn.Module) -> Counter[str]:
    return Counter({name: count[name] for name, _, _ in find_linears(model).covered})


@pytest.mark.parametrize("family", DECODERS)
def test_every_linear_of_every_family_has_its_own_work(family: str) -> None:
    model = tiny_decoder(family)
    flops, saved = _run(model)
    one = _products(model)
    assert _of_linears(flops.forward, model) == one
    assert _of_linears(flops.backward, model) == Counter({name: 2 * work for name, work in one.items()})
    assert flops.recomputed.total() == 0
    assert flops.total == flops.forward.total() + flops.backward.total()
    attention = [name for name in flops.backward if name.rpartition(".")[2] in ("self_attn", "attn", "attention")]
    assert len(attention) == 2  # the products of queries, keys and values belong to the attention itself
    assert saved.by_module.total() == saved.total > 0
    assert "" in saved.by_module  # the loss


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_told_apart(family: str, reentrant: bool) -> None:
    model = tiny_model(family)
    plain, _ = _run(model)
    checkpoint_activations(model, use_reentrant=reentrant)
    flops, _ = _run(model)
    assert flops.backward == plain.backward
    assert flops.forward == plain.forward
    head = find_linears(model).covered[-1][0]
    assert flops.recomputed[head] == 0
    short = {name for name in plain.forward if name != head and flops.recomputed[name] != plain.forward[name]}
    last = {"llama": "down_proj", "gpt_neox": "dense_4h_to_h"}.get(family, "")
    if reentrant or not last:
        assert not [name for name in short if "rotary" not in name]
    else:  # its output is wanted by nothing: PyTorch ends the second forward before it
        assert {name.rpartition(".")[2] for name in short if "rotary" not in name} == {last}
        assert all(flops.recomputed[name] == 0 for name in short)


@pytest.mark.parametrize(("along", "share"), [("rows", 0.25), ("columns", 0.25), ("elements", 1.0)])
def test_what_a_selection_leaves_is_counted_at_its_linear(along: str, share: float) -> None:
    model = tiny_model("llama")
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.25, along=along)]) as engine:
        flops, _ = _run(model, engine.backward)
    expected = Counter({name: int(2 * share * work) for name, work in _products(model).items()})
    assert _of_linears(flops.backward, model) == expected


def test_frozen_weights_have_no_wgrad() -> None:
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(False)
    frozen = [module for name, module, _ in find_linears(model).covered if "layers.1" in name]
    for module in frozen:
        module.requires_grad_(False)
    flops, _ = _run(model)
    one = _products(model)
    assert flops.backward["model.layers.1.mlp.up_proj"] == one["model.layers.1.mlp.up_proj"]
    assert flops.backward["model.layers.0.mlp.up_proj"] == 2 * one["model.layers.0.mlp.up_proj"]


class _Again(Function):
    """Runs a module without a graph, and again with one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.module(x) @ torch.eye(grad.shape[1])  # a product of nobody's forward
        dx, *rest = torch.autograd.grad(output, [x, *ctx.parameters], grad)
        return dx, None, *rest


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(x, self.inner, *self.inner.parameters())


@pytest.mark.parametrize("times", [1, 2])
def test_a_graph_built_inside_the_backward_belongs_to_its_modules(times: int) -> None:
    inner = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model = nn.Sequential(nn.Linear(4, 5), _Recomputed(inner), nn.Linear(3, 2))
    x = torch.randn(N, 4, requires_grad=True)
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        for _ in range(times):
            model(x).sum().backward()
    first, second, eye = 2 * N * 5 * 7, 2 * N * 7 * 3, 2 * N * 3 * 3
    assert flops.forward == {
        "0": times * 2 * N * 4 * 5,
        "1.inner.0": times * first,
        "1.inner.2": times * second,
        "2": times * 2 * N * 3 * 2,
    }
    assert flops.recomputed == {"1.inner.0": times * first, "1.inner.2": times * second}
    assert flops.backward == {
        "0": times * 2 * 2 * N * 4 * 5,
        "1.inner.0": times * 2 * first,
        "1.inner.2": times * 2 * second,
        "1": times * 2 * eye,  # forward and dgrad
        "2": times * 2 * 2 * N * 3 * 2,
    }


def test_checkpointing_inside_a_graph_that_is_built_inside_the_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layers, x, use_reentrant=False)

    model = nn.Sequential(_Recomputed(Checkpointed()))
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        model(torch.randn(N, 5, requires_grad=True)).sum().backward()
    first, second = 2 * N * 5 * 7, 2 * N * 7 * 3
    names = "0.inner.layers.0", "0.inner.layers.2"
    assert [flops.backward[name] for name in names] == [2 * first, 2 * second]
    assert [flops.recomputed[name] for name in names] == [2 * first, 2 * second]


def test_a_module_that_is_used_twice_has_both() -> None:
    linear = nn.Linear(6, 6)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        model(torch.randn(N, 6, requires_grad=True)).sum().backward()
    assert flops.forward == {"0": 2 * 2 * N * 36}
    assert flops.backward == {"0": 4 * 2 * N * 36}


def test_losses_that_wait_for_one_another_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    x = torch.randn(N, 6)
    with ModuleTrace(model) as trace:
        losses = [model(x).sum(), model(x).square().sum()]
        outside = (x @ torch.ones(6, 1, requires_grad=True)).sum()
        with count_flops(trace) as flops:
            losses[0].backward()
            (losses[1] + outside).backward()
    assert flops.backward == {"0": 2 * 2 * N * 36, "1": 2 * 4 * N * 12, "": 2 * N * 6}


def test_no_hook_is_left_in_the_model() -> None:
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="stop"), ModuleTrace(model):
        raise RuntimeError("stop")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_the_work_of_every_module_is_known_at_nodes_too() -> None:
    model = tiny_decoder("llama")
    with sbp.attach(model, [sbp.make_policy("topk", keep=1.0)], sites="nodes") as attached:
        flops, _ = _run(model, attached.backward)
    assert _of_linears(flops.backward, model) == Counter({n: 2 * work for n, work in _products(model).items()})


def test_the_walk_in_python_counts_all_and_tells_no_module() -> None:
    model = tiny_decoder("llama")
    plain, _ = _run(model)
    with sbp.attach(model, [sbp.make_policy("topk", keep=1.0)], sites="nodes", execution="reference") as attached:
        flops, _ = _run(model, attached.backward)
    assert flops.forward == plain.forward
    assert flops.backward == {"": plain.backward.total()}


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
def test_a_sparse_product_counts_what_is_stored(layout: torch.layout) -> None:
    dense = torch.zeros(4, 5)
    dense[0, 1] = dense[3, 2] = dense[3, 4] = 1.0
    sparse = dense.to_sparse(layout=layout)
    with count_flops() as flops:
        sparse @ torch.ones(5, 7)
    assert flops.total == 2 * 3 * 7
    with count_flops() as flops:
        torch.sparse.mm(sparse, torch.ones(5, 7))
    assert flops.total == 2 * 3 * 7
    with count_flops() as flops:
        sparse @ torch.ones(5)
    assert flops.total == 2 * 3


def test_products_with_vectors_are_counted() -> None:
    a, x = torch.ones(4, 5), torch.ones(5)
    with count_flops() as flops:
        a @ x
    assert flops.total == 2 * 20
    with count_flops() as flops:
        torch.dot(x, x)
    assert flops.total == 10
    with count_flops() as flops:
        torch.addmv(torch.ones(4), a, x)
    assert flops.total == 2 * 20


@pytest.mark.parametrize("kept", [1, 7])
def test_the_sparse_form_of_single_entries_counts_those(kept: int) -> None:
    rows, inputs, outputs = 64, 12, 32
    linear = nn.Linear(inputs, outputs)
    policy = Given(given=Elements(torch.arange(kept) * 3))
    with sbp.attach(nn.ModuleList([linear]), [policy]) as engine:
        x = torch.randn(rows, inputs, requires_grad=True)
        with ModuleTrace(linear) as trace, count_flops(trace) as flops:
            engine.backward(linear(x).sum())
    assert flops.backward == {"": 2 * 2 * kept * inputs}
