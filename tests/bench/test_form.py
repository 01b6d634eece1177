"""Forms follow from a policy's own options; nobody lists them."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.policy import find_policies
from sparsebp_cli.policy.router import EdgeRouter
from sparsebp_cli.recipe import load_recipe
from sparsebp_tools.bench import find_forms
from sparsebp_tools.bench.form import FEW_KEEPS, KEEPS
from sparsebp_tools.bench.request import BATCH, LENGTH, MODEL
from tests.docs.block import ROOT


def _labels(name: str, **options: Any) -> list[tuple[str, str]]:
    return [(form.site, form.label) for form in find_forms(name, **options)]


def test_every_kind_of_selection_that_options_lead_to_is_a_form() -> None:
    linears = ["rows", "columns", "blocks", "elements csr", "elements masked", "2:4"]
    assert _labels("topk") == _labels("random") == [("linears", label) for label in linears]


def test_shares_that_a_form_refuses_are_not_measured() -> None:
    keeps = {form.label: form.keeps for form in find_forms("topk")}
    assert keeps["2:4"] == (0.5,)
    assert keeps["rows"] == KEEPS
    assert keeps["elements csr"] == keeps["elements masked"] == (*KEEPS, *FEW_KEEPS)
    assert {form.keeps for form in find_forms("topk", keeps=[0.3, 0.2])} == {(0.3, 0.2)}


def test_an_option_is_given_to_all_forms_that_take_it() -> None:
    labels = _labels("topk", options={"within": "example", "by": "l1"})
    assert ("linears", "columns") not in labels
    assert ("linears", "rows") in labels
    assert all(form.options["by"] == "l1" for form in find_forms("topk", options={"by": "l1"}))
    assert _labels("topk", options={"along": "columns"}) == [("linears", "topk")]


def test_at_nodes_every_form_is_masked() -> None:
    forms = find_forms("topk", sites=["nodes"])
    assert {form.execution for form in forms} == {"masked"}
    assert len({form.label for form in forms}) == 5


def test_a_router_is_measured_with_every_value_of_its_own_options() -> None:
    expected = [("nodes", label) for label in ("max-child", "leaves always", "ties all", "ties random")]
    assert _labels("max-child") == expected


def test_a_policy_without_options_has_one_form() -> None:
    assert _labels("dense") == [("linears", "dense")]


BUILT_IN = {name: found.kind for name, found in find_policies().items() if found.source.startswith("sparsebp ")}
AT_SITES = ("GradientSelector", "EdgeRouter")


@pytest.mark.parametrize("name", [name for name, kind in BUILT_IN.items() if kind not in AT_SITES])
def test_a_policy_that_is_not_asked_at_sites_has_no_forms(name: str) -> None:
    with pytest.raises(UsageError, match=f"bench cannot time policies of the kind {BUILT_IN[name]}, such as {name!r}"):
        find_forms(name)


@pytest.mark.parametrize("name", [name for name, kind in BUILT_IN.items() if kind in AT_SITES])
def test_every_form_of_every_built_in_policy_can_be_made(name: str) -> None:
    for form in find_forms(name):
        for keep in form.keeps:
            form.make(name, keep)
    assert (find_policies()[name].kind == EdgeRouter.__name__) == (form.site == "nodes")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("tpok", {}, "unknown policy 'tpok'; installed: .*; did you mean topk?"),
        ("topk", {"options": {"withn": "row"}}, "unknown key 'withn'; .*; did you mean within?"),
        ("topk", {"options": {"within": "rows"}}, "within: got 'rows', allowed: 'batch', 'example', 'row'"),
        ("topk", {"options": {"keep": 0.1}}, "give the values of the option keep"),
        ("dense", {"keeps": [0.5]}, "'dense' has no option keep"),
        ("max-child", {"keeps": [0.5]}, "'max-child' has no option keep"),
        (
            "max-child",
            {"sites": ["linears"]},
            "decides at nodes of the autograd graph: it needs sites='nodes', got 'linears'",
        ),
        ("max-child", {"options": {"leaves": "never"}}, "leaves: got 'never', allowed: 'compete', 'always'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SparseBPError, match=text) as refusal:
        find_forms(name, **options)
    assert refusal.value.exit_code == 2


def test_without_a_recipe_the_shapes_are_those_of_python_docs() -> None:
    recipe = load_recipe(ROOT / "recipes" / "start" / "python-docs.yaml", [])
    shapes = recipe.model.name, recipe.dataset.max_seq_length, recipe.training.per_device_train_batch_size
    assert shapes == (MODEL, LENGTH, BATCH)
