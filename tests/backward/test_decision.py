"""What every selector can do: layers in or out, and options that do not go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import GradientSelector, Rows, Site, Step

from .conftest import tiny_model, tokens


@pytest.mark.model
@pytest.mark.parametrize(("layers", "asked"), [([0], {0}), ([-1], {1}), ([0, -1], {0, 1}), ([], set()), (None, {0, 1})])
def test_only_the_layers_that_were_named_are_asked(layers: list[int] | None, asked: set[int]) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    policy = sbp.make_policy("topk", keep=0.25, layers=layers)
    with sbp.attach(model, [policy]) as engine:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        report = engine.report()
    inside = [site for site in report.sites if site.layer is not None]
    assert {site.layer for site in inside if site.kept_share != 1.0} == asked
    outside = [site.kept_share for site in report.sites if site.layer is None]
    assert set(outside) <= ({0.25} if layers is None else {1.0})


@pytest.mark.model
def test_a_layer_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="layers: the model has no layer 2; allowed: -2 to 1"):
        sbp.attach(tiny_model("llama"), [sbp.make_policy("topk", keep=0.5, layers=[2])])
    with pytest.raises(UnsupportedError, match="has no layer 0; allowed: none, because SparseBP found no layers"):
        sbp.attach(nn.Linear(2, 2), [sbp.make_policy("topk", keep=0.5, layers=[0])])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"name": "topk", "keep": 0.5, "error_feedback": True},
            "unknown key 'error_feedback'",
        ),
        ({"name": "topk", "keep": 0.5, "keep_warmup_steps": 3}, "unknown key 'keep_warmup_steps'"),
        ({"name": "topk", "keep": 0.25, "along": "2:4"}, r"or 1.0 for dense, got 0.25"),
        (
            {"name": "topk", "keep": 0.5, "along": "columns", "within": "example"},
            "is not allowed with 'along: columns'",
        ),
        ({"name": "random", "keep": 0.5, "within": "row"}, "'within: row' is not allowed with 'along: rows'"),
        ({"name": "topk", "keep": 0.5, "block": [0, 4]}, "must be"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PolicyError, match=text) as caught:
        sbp.make_policy(options.pop("name"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["topk", "random"])
def test_the_same_number_of_rows_is_kept_of_each_example(name: str) -> None:
    policy = sbp.make_policy(name, keep=0.25, within="example")
    assert isinstance(policy, GradientSelector)
    rows = policy.select(torch.randn(24, 5), Site("layer", 5, (3, 8)), Step(0))
    assert isinstance(rows, Rows)
    assert rows.num_examples == 3
    assert (rows.index_K // 8).tolist() == [0, 0, 1, 1, 2, 2]
