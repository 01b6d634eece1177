"""Runs that save less of inputs: killed and resumed, measured, and on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History
from sparsebp_cli.run.metric import METRICS
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA, work
from tests.worker.test_processes import weights_of

ROWS = {"name": "wta-crs", "keep": 0.5}
CODES = {"name": "gact", "bits": 2, "adapt_interval": 4}
DIRECTION = {"name": "velora", "group": 8}


def _history(run: Any) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def _last(history: History, name: str) -> float:
    return list(history.series(name).values())[-1]


@pytest.mark.parametrize(
    "policy",
    [ROWS, pytest.param(CODES, marks=pytest.mark.long), pytest.param(DIRECTION, marks=pytest.mark.long)],
    ids=["rows", "codes", "direction"],
)
def test_a_killed_run_that_saves_less_resumes_identically(tiny_recipe, prepared, policy) -> None:
    recipe = tiny_recipe(
        policy=[policy],
        training={"max_steps": 30, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        checkpoint={"every": 3},
        backward={"checkpointing": "full"},
    )
    resume_killed(recipe, prepared)


def test_measuring_changes_no_weight_and_no_number_and_sees_the_draws_vary(tiny_recipe, prepared) -> None:
    often = {"probe_every": 1, "fidelity_every": 1, "fidelity_draws": 3, "eval_every": 2, "eval_examples": 8}
    never = often | {"probe_every": None, "fidelity_every": None}
    shared = {"policy": [ROWS], "training": {"max_steps": 4}}
    measured, plain = (prepared(tiny_recipe(**shared, measure=measure)) for measure in (often, never))
    told, expected = _history(measured), _history(plain)
    ours, theirs = weights_of(measured), weights_of(plain)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    for name in expected.metrics:
        if not METRICS[name].timing:
            assert told.series(name) == expected.series(name), name
    assert set(told.series("fidelity/cosine")) == set(range(1, 5))
    assert all(variance > 0.0 for variance in told.series("fidelity/variance").values())


@pytest.mark.parametrize(
    ("policy", "sections", "executed"),
    [
        (ROWS, {}, "less"),
        (CODES, {}, "all"),
        (ROWS, {"model": {"config": LLAMA, "lora": {"r": 4}}}, "less"),
        (ROWS, {"backward": {"checkpointing": "full"}}, "less"),
        ({"name": "wta-crs", "keep": 1.0}, {}, "all"),
    ],
    ids=["rows", "codes", "lora", "checkpointing", "everything"],
)
def test_a_run_claims_what_it_executes_and_saves_less(tiny_recipe, prepared, policy, sections, executed) -> None:
    measure = {"probe_every": 5, "fidelity_every": None}
    history = _history(prepared(tiny_recipe(policy=[policy], training={"max_steps": 5}, measure=measure, **sections)))
    share = _last(history, "proof/executed_share")
    if "backward" not in sections:  # which ends a repeated forward at the last tensor, not at the last product
        assert share == pytest.approx(_last(history, "proof/claimed_share"), rel=1e-9)
    assert (share < 1.0) == (executed == "less")
    assert _last(history, "proof/excess_share") == 0.0
    saved, dense = (_last(history, f"memory/{name}saved_for_backward_bytes") for name in ("", "dense_"))
    assert saved == dense if policy.get("keep") == 1.0 else saved < dense


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ("backward: {sites: nodes}", "'gact' saves inputs of linear layers: needs backward.sites: linears, got nodes"),
        ("target: {processes: 2, sharding: fsdp2}", "'gact' needs target.sharding: none"),
        ("model: {name: austen-llama, float8: emulated}", "'gact' with model.float8: emulated is not supported"),
    ],
)
def test_a_recipe_is_refused_where_inputs_are_not_saved(tmp_path, sections, text) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"version: 1\nname: refused\ndataset: {{name: austen}}\npolicy: [{{name: gact}}]\n{sections}\n"
        f"{'' if 'model' in sections else 'model: {name: austen-llama}'}\ntraining: {{max_steps: 1}}\n"
    )
    with pytest.raises(RecipeError, match=text):
        load_recipe(file)
