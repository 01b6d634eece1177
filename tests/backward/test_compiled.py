"""An attached model under torch.compile is one graph, and its policy is asked when the backward runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from tests.selector import Promises

pytestmark = pytest.mark.compiles
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SIZES: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "rows": ("topk", {"keep": 0.3, "along": "rows"}),
    "by example": ("topk", {"keep": 0.3, "along": "rows", "within": "example"}),
    "drawn columns": ("random", {"keep": 0.3, "along": "columns"}),
    "blocks": ("topk", {"keep": 0.3, "along": "blocks", "block": (4, 8)}),
    "2:4": ("topk", {"keep": 0.5, "along": "2:4"}),
    "crs": ("crs", {"keep": 0.3, "products": "both"}),
    "frozen": ("frozen", {"train": ["/(o_proj|c_proj)/"]}),
}
QUICK = {("gpt2", "crs")}
CELLS = [
    pytest.param(family, policy, marks=() if (family, policy) in QUICK else pytest.mark.long)
    for family in SIZES
    for policy in POLICIES
]


@pytest.mark.parametrize(("family", "policy"), CELLS)
def test_an_attached_model_is_one_graph_with_the_gradients_of_eager_mode(family: str, policy: str) -> None:
    expected = _train(family, policy, backend=None)
    counters.clear()
    ours = _train(family, policy, backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for step, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        assert mine.keys() == other.keys()
        for name, grad in mine.items():
            rtol, atol = (1e-4, 1e-6) if policy == "crs" else (1e-11, 1e-14)
            torch.testing.assert_close(grad, other[name], rtol=rtol, atol=atol, msg=f"{name} in step {step}")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["rows", "crs"])
def test_inductor_makes_one_graph_with_the_gradients_of_eager_mode(policy: str) -> None:
    ours, expected = (_train("llama", policy, backend=backend) for backend in ("inductor", None))
    for mine, other in zip(ours, expected, strict=True):
        for name, grad in mine.items():
            rtol, atol = (1e-3, 1e-5) if policy == "crs" else (1e-5, 1e-6)
            torch.testing.assert_close(grad, other[name], rtol=rtol, atol=atol, msg=name)


def _train(family: str, policy: str, backend: str | None) -> list[dict[str, Tensor | None]]:
    """Return the gradients of two steps."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=32, **SIZES[family]))
    dtype = torch.float32 if policy == "crs" else torch.float64  # the way to a norm of float32 depends on its value
    model.to(dtype).train().loss_type = "ForCausalLM"  # without it gpt2 logs, which is no part of a graph
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    name, options = POLICIES[policy]
    found = []
    with sbp.attach(model, sbp.make_policy(name, **options), optimizer=optimizer, seed=3) as engine:
        called = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            ids = torch.randint(1, 32, (2, 6))
            engine.backward(called(input_ids=ids, labels=ids, use_cache=False).loss)
            found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return found


class Asked(Promises):
    """Keeps everything, and writes down when."""

    def select(self, grad_NO: Tensor, site: Any, step: Any) -> None:
        ASKED.append((site.name, site.batch_shape, step.index))


ASKED: list[tuple[str, tuple[int, ...], int]] = []


@pytest.fixture
def asked() -> Iterator[list[tuple[str, tuple[int, ...], int]]]:
    """What was asked, from nothing."""
    ASKED.clear()
    yield ASKED
    ASKED.clear()


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def _compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def test_the_policy_is_asked_at_every_backward_and_never_while_it_is_compiled(
    asked: list[tuple[str, tuple[int, ...], int]],
) -> None:
    model = _chain()
    called, x = _compile(model), torch.randn(2, 3, 8)
    with sbp.attach(model, Asked()) as engine:
        loss = called(x).sum()
        assert asked == []
        engine.backward(loss)
        engine.backward(called(x).sum())
        with engine.disabled():
            called(x).sum().backward()
    assert asked == [(name, (2, 3), step) for step in (0, 1) for name in ("1", "0")]


def test_a_graph_follows_its_engine_and_is_plain_after_detach(asked: list[tuple[str, tuple[int, ...], int]]) -> None:
    model = _chain()
    called, x = _compile(model), torch.randn(2, 3, 8)
    called(x).sum().backward()  # compiled before it is attached
    dense = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    first = sbp.attach(model, Asked())
    first.backward(called(x).sum())
    stale = called(x).sum()
    first.detach()
    with pytest.raises(UsageError, match="detach"):
        first.backward(stale)
    with pytest.raises(UsageError, match="ran through an attached model"):
        stale.backward()
    del first, stale
    gc.collect()
    with sbp.attach(model, sbp.make_policy("topk", keep=0.5)) as second:
        second.backward(called(x).sum())
        assert [site.calls for site in second.report().sites] == [1, 1]
    assert len(asked) == 2  # by the first engine alone
    model.zero_grad()
    called(x).sum().backward()
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), dense, strict=True) if p.grad is not None
    )


def test_a_backward_of_a_graph_whose_engine_is_gone_is_refused() -> None:
    model = _chain()
    called = _compile(model)
    engine = sbp.attach(model, sbp.make_policy("topk", keep=0.5))
    loss = called(torch.randn(2, 3, 8)).sum()
    engine.detach()
    del engine
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(UsageError, match="compiled forward whose engine is detached"):
        loss.backward()


def test_compiled_models_with_an_engine_each_ask_their_own(asked: list[tuple[str, tuple[int, ...], int]]) -> None:
    one, other = _chain(), _chain()
    x = torch.randn(2, 3, 8)
    with sbp.attach(one, Asked()) as first, sbp.attach(other, sbp.make_policy("topk", keep=0.5)) as second:
        losses = [_compile(model)(x).sum() for model in (one, other)]
        second.backward(losses[1])
        assert asked == []
        first.backward(losses[0])
    assert [name for name, _, _ in asked] == ["1", "0"]


def test_a_frozen_weight_stores_and_multiplies_nothing_for_its_gradient_in_a_graph() -> None:
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    model = _chain()
    x = torch.randn(2, 3, 8, requires_grad=True)
    for is_trained in (True, False):
        model[0].requires_grad_(is_trained)
        saved.clear()
        with sbp.attach(model, []) as engine, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.backward(_compile(model)(x).sum())
            flops = {site.name: site.dense_flops for site in engine.report().sites}
        assert ((2, 3, 8) in saved) == is_trained
        assert flops["0"] == (2 if is_trained else 1) * 2 * 6 * 8 * 16


def test_rows_of_unknown_examples_are_refused_in_a_graph() -> None:
    model = _chain()
    with sbp.attach(model, sbp.make_policy("topk", keep=0.5, along="rows", within="example")) as engine:
        loss = _compile(model)(torch.randn(6, 8)).sum()
        with pytest.raises(UnsupportedError, match="which example each gradient row"):
            engine.backward(loss)


def test_linears_that_are_compiled_one_by_one_share_a_graph() -> None:
    layers = [nn.Linear(8, 8) for _ in range(12)]
    model = nn.Sequential(*layers)
    with sbp.attach(model, sbp.make_policy("topk", keep=0.5)) as engine:
        for layer in layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        counters.clear()
        engine.backward(model(torch.randn(2, 3, 8)).sum())
        assert [site.calls for site in engine.report().sites] == [1] * 12
    assert counters["stats"]["unique_graphs"] < 8  # PyTorch's limit
