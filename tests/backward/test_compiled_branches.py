"""Branches of an attached model under torch.compile are parts of one graph; the policy is asked in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp

pytestmark = pytest.mark.compiles
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SIZES: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": GPT2, "gemma2": LLAMA}
TOP = {"name": "topk", "keep": 0.3, "along": "rows", "within": "example"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": (TOP, {}),
    "warm-up": (TOP | {"keep_warmup_steps": 2}, {}),
    "error feedback": (TOP | {"error_feedback": True}, {}),
    "drawn": ({"name": "random", "keep": 0.3, "along": "rows"}, {}),
    "recomputed": (TOP, {"checkpointing": "sparse"}),
    "columns": ({"name": "topk", "keep": 0.3, "along": "columns"}, {}),
    "reference": (TOP, {"execution": "reference"}),
}
QUICK = {("gpt2", "drawn")}
CELLS = [
    pytest.param(family, case, marks=() if (family, case) in QUICK else pytest.mark.long)
    for family in SIZES
    for case in CASES
    if family != "gemma2" or case in ("rows", "columns")
]


@pytest.mark.parametrize(("family", "case"), CELLS)
def test_branches_are_parts_of_one_graph_with_the_gradients_of_eager_mode(family: str, case: str) -> None:
    expected, report = _train(family, case, backend=None)
    counters.clear()
    ours, counted = _train(family, case, backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    if case != "warm-up":  # where everything is kept a graph runs the branch again, and eager mode does not
        assert counted == report
    for step, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        for name, grad in mine.items():
            torch.testing.assert_close(grad, other[name], rtol=1e-10, atol=1e-13, msg=f"{name} in step {step}")


@pytest.mark.long
@pytest.mark.parametrize("family", SIZES)
def test_inductor_makes_one_graph_of_branches(family: str) -> None:
    (ours, _), (expected, _) = (_train(family, "rows", backend=backend) for backend in ("inductor", None))
    for mine, other in zip(ours, expected, strict=True):
        for name, grad in mine.items():
            torch.testing.assert_close(grad, other[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.long
def test_a_branch_with_dropout_splits_the_graph_and_draws_as_in_eager_mode() -> None:
    expected, _ = _train("gpt2", "rows", backend=None, resid_pdrop=0.5)
    counters.clear()
    ours, _ = _train("gpt2", "rows", backend="aot_eager", fullgraph=False, resid_pdrop=0.5)
    assert counters["graph_break"]
    for mine, other in zip(ours, expected, strict=True):
        for name, grad in mine.items():
            torch.testing.assert_close(grad, other[name], rtol=1e-10, atol=1e-13, msg=name)


def _train(
    family: str, case: str, backend: str | None, *, fullgraph: bool = True, **sizes: object
) -> tuple[list[dict[str, Tensor]], list[tuple[object, ...]]]:
    """Return the gradients of three steps, and what the engine counted."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, **SIZES[family], **sizes}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.to(torch.float64).train().loss_type = "ForCausalLM"  # without it gpt2 logs, which is no part of a graph
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (policy, options), found = CASES[case], []
    made = sbp.make_policy(policy["name"], **{name: value for name, value in policy.items() if name != "name"})
    with sbp.attach(model, made, sites="branches", optimizer=optimizer, seed=3, **options) as engine:
        called = model if backend is None else torch.compile(model, backend=backend, fullgraph=fullgraph)
        for _ in range(3):
            ids = torch.randint(1, 32, (2, 6))
            engine.backward(called(input_ids=ids, labels=ids, use_cache=False).loss)
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        sites = engine.report().sites
    return found, [(s.name, s.calls, s.rows, s.kept_share, s.dense_flops, s.claimed_flops) for s in sites]
