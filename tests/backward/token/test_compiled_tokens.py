"""Token selection in mode detach under torch.compile: one graph for every choice, with eager mode's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import sparsebp_cli as sbp

pytestmark = pytest.mark.compiles
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SIZES: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
CASES: dict[str, dict[str, Any]] = {
    "marked": {"score": "mask"},
    "drawn": {"score": "random", "keep": 0.5},
}
CELLS = [
    pytest.param(family, case, marks=() if (family, case) == ("gpt2", "marked") else pytest.mark.long)
    for family in SIZES
    for case in CASES
]
SHARES = (0.5, 0.2, 1.0, 0.0)  # of the labels that are trained, step by step


@pytest.mark.parametrize(("family", "case"), CELLS)
def test_one_graph_serves_every_choice_with_the_gradients_of_eager_mode(family: str, case: str) -> None:
    expected, dense = _train(family, case, backend=None)
    counters.clear()
    ours, counted = _train(family, case, backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert counted == dense
    for step, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-9, msg=f"{name} in step {step}")


@pytest.mark.long
@pytest.mark.parametrize("family", SIZES)
def test_inductor_makes_one_graph_of_selected_tokens(family: str) -> None:
    (ours, _), (expected, _) = (_train(family, "marked", backend=backend) for backend in ("inductor", None))
    for mine, other in zip(ours, expected, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6, msg=name)


def _train(family: str, case: str, backend: str | None) -> tuple[list[dict[str, Tensor]], list[tuple[str, float]]]:
    """Return the losses and gradients of some steps, and the dense work that the engine counted."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=32, **SIZES[family]))
    model.to(torch.float64).train().loss_type = "ForCausalLM"  # without it gpt2 logs, which is no part of a graph
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[dict[str, Tensor]] = []
    draws = torch.Generator().manual_seed(1)
    policy = sbp.make_policy("tokens", mode="detach", **CASES[case])
    with sbp.attach(model, policy, optimizer=optimizer, seed=3) as engine:
        called = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        for share in SHARES:
            ids = torch.randint(1, 32, (2, 9), generator=draws)
            labels = ids.masked_fill(torch.rand(2, 9, generator=draws) > share, -100)
            real = torch.ones_like(ids)
            real[0, 7:] = 0  # padding
            loss = called(input_ids=ids, attention_mask=real, labels=labels.masked_fill(real == 0, -100)).loss
            engine.backward(loss)
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            found[-1]["loss"] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        sites = engine.report().sites
    return found, [(site.name, site.dense_flops) for site in sites]
