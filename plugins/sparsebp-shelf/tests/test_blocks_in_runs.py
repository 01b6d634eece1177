"""Dropped blocks in whole runs: killed and resumed, measured, and on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsebp_cli.compare.cost import find_step_cost, probe_ratio
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History
from sparsebp_cli.run.metric import METRICS
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA, work
from tests.worker.ranks import make_run, train_alone, train_on_two
from tests.worker.test_processes import ABSOLUTE, RELATIVE, make_recipe, weights_of

__all__ = ["make_recipe"]  # a fixture

THREE = LLAMA | {"num_hidden_layers": 3}
DROPPING = THREE | {"attention_dropout": 0.1}
HALF = {"name": "dropbp", "keep": 0.5}


def _history(run: Any) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def _last(history: History, name: str) -> float:
    return list(history.series(name).values())[-1]


@pytest.mark.parametrize(
    "options",
    [{"name": "dropbp"}, {"name": "dropbp", "sensitivity_at": 0.5}],
    ids="-".join,
)
def test_a_killed_run_with_dropped_blocks_resumes_identically(tiny_recipe, prepared, options) -> None:
    recipe = tiny_recipe(
        model={"config": DROPPING},
        policy=[options | {"keep": 0.4}],  # 2.4 of 6 blocks: 2 at some steps, 3 at others
        training={"max_steps": 30, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        checkpoint={"every": 3},
        backward={"checkpointing": "full"},
    )
    resume_killed(recipe, prepared)


def test_measuring_a_run_with_dropped_blocks_changes_no_weight_and_no_number(tiny_recipe, prepared) -> None:
    often = {"probe_every": 1, "fidelity_every": 1, "fidelity_draws": 3, "eval_every": 2, "eval_examples": 8}
    never = often | {"probe_every": None, "fidelity_every": None}
    shared = {"model": {"config": DROPPING}, "policy": [HALF], "training": {"max_steps": 4}}
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
    ("policy", "sections"),
    [
        ([HALF], {}),
        ([HALF], {"model": {"config": THREE, "lora": {"r": 4}}}),
        ([{"name": "dropbp", "keep": 1.0}], {}),
        ([HALF, {"name": "topk", "keep": 0.25}], {}),
    ],
    ids=["half", "lora", "everything", "with rows"],
)
def test_a_run_claims_what_a_backward_needs_and_executes_it(tiny_recipe, prepared, policy, sections) -> None:
    measure = {"probe_every": 5, "fidelity_every": None}
    shared = {"model": {"config": THREE}, "training": {"max_steps": 5}, "measure": measure}
    history = _history(prepared(tiny_recipe(policy=policy, **(shared | sections))))
    claimed, executed = _last(history, "proof/claimed_share"), _last(history, "proof/executed_share")
    assert executed == pytest.approx(claimed, rel=1e-9)
    assert (executed == 1.0) == (policy[0]["keep"] == 1.0)
    assert _last(history, "proof/excess_share") == 0.0
    saved, dense = (
        _last(history, "memory/saved_for_backward_bytes"),
        _last(history, "memory/dense_saved_for_backward_bytes"),
    )
    assert (saved == dense) == (policy[0]["keep"] == 1.0)


def test_trial_passes_are_counted_once_and_are_part_of_the_cost(tiny_recipe, prepared) -> None:
    shared = {"model": {"config": THREE}, "training": {"max_steps": 4, "gradient_accumulation_steps": 2}}
    sensitive = HALF | {"sensitivity_at": 0.5}
    measure = {"probe_every": 1, "fidelity_every": None}
    run = prepared(tiny_recipe(policy=[sensitive], measure=measure, **shared))
    history = _history(run)
    trials = history.series("flops/probing")
    assert list(trials) == [3]
    forward, dense = history.series("flops/forward")[3], history.series("flops/backward_dense")[3]
    assert (
        6 * forward < trials[3] - forward - dense < 6 * (forward + dense)
    )  # one whole pass, and one for each of 6 blocks
    plain = _history(prepared(tiny_recipe(policy=[HALF], measure=measure, **shared)))
    assert "flops/probing" not in plain.metrics
    cost, timed = find_step_cost([load_folder(run)]), probe_ratio([load_folder(run)])
    assert cost is not None
    assert timed is not None
    assert cost.ratio.median == pytest.approx(timed.median + trials[3] / (forward + dense) / 8)  # micro-batches


def test_two_processes_drop_the_same_blocks_and_train_as_one_does(make_recipe, tmp_path) -> None:
    case: dict[str, Any] = {"policy": [HALF], "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}}
    one, two = make_run(make_recipe(**case), tmp_path), make_run(make_recipe(2, **case), tmp_path)
    train_alone([one])
    train_on_two([two])
    expected, found = History.load(one.path), History.load(two.path)
    for name in ("train/loss", "train/grad_norm", "eval/loss", "fidelity/cosine"):
        assert found.series(name) == pytest.approx(expected.series(name), rel=RELATIVE), name
    ours, theirs = weights_of(two), weights_of(one)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ("backward: {sites: nodes}", "'dropbp' needs backward.sites: linears, got nodes"),
        ("target: {processes: 2, sharding: fsdp2}", "'dropbp' needs target.sharding: none"),
    ],
)
def test_a_recipe_is_refused_by_its_line(tmp_path, sections, error) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "version: 1\nname: x\nmodel: {name: austen-llama}\ndataset: {name: austen}\n"
        f"policy: [{{name: dropbp, keep: 0.5}}]\n{sections}\n"
    )
    with pytest.raises(RecipeError, match=error):
        load_recipe(path)
