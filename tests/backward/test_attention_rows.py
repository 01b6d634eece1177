"""At linears with rows, attention leaves out the queries whose output gets no gradient, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.backward.linear import attention

from .conftest import tokens
from .families import tiny_decoder

IDS = tokens(1, 2, 40)
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FEWEST_POSITIONS", 8)
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", 3)


def _make(family: str, **options: Any) -> nn.Module:
    return tiny_decoder(family, dtype=torch.float64, **options)


def _step(model: nn.Module, execution: str, **options: Any) -> tuple[dict[str, Tensor | None], dict[str, int], Any]:
    with (
        sbp.attach(model, [sbp.make_policy("topk", **options)], execution=execution) as engine,
        count_flops() as flops,
    ):
        engine.backward(model(input_ids=IDS, labels=IDS).loss)
        report = engine.report()
    return {name: p.grad for name, p in model.named_parameters()}, dict(flops.by_operator), report


@pytest.mark.parametrize("within", ["batch", "example"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_queries_without_gradient_are_left_out_and_gradients_stay(family: str, within: str) -> None:
    options = {"keep": 0.1, "within": within}
    ours, flops, report = _step(_make(family), "fast", **options)
    theirs, all_flops, expected = _step(_make(family), "reference", **options)
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-9, atol=1e-12)
    assert flops[BACKWARD] < 0.2 * all_flops[BACKWARD]
    assert report.whole == expected.whole


@pytest.mark.parametrize("case", ["most rows", "columns", "frozen queries", "eager", "short"])
def test_attention_stays_pytorchs_own_where_it_leaves_nothing_out(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"keep": 0.9 if case == "most rows" else 0.1}
    if case == "columns":
        options["along"] = "columns"
    if case == "short":
        monkeypatch.setattr(attention, "_FEWEST_POSITIONS", 41)
    chosen = {"attn_implementation": "eager"} if case == "eager" else {}
    found = []
    for execution in ("fast", "reference"):
        model = _make("llama", **chosen)
        if case == "frozen queries":
            model.requires_grad_(False)
            model.lm_head.requires_grad_(True)
        found.append(_step(model, execution, **options)[1].get(BACKWARD))
    assert found[0] == found[1]


def test_a_gradient_at_every_query_is_differentiated_to_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 40, 8, generator=generator).requires_grad_() for _ in range(3)]
    grad, found = torch.randn(2, 4, 40, 8, generator=generator), []
    for attend in (attention._attend, nn.functional.scaled_dot_product_attention):
        output = attend(*tensors, is_causal=True)
        found.append([output, *torch.autograd.grad(output, tensors, grad)])
    assert found[0][0].grad_fn.name() != found[1][0].grad_fn.name()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
