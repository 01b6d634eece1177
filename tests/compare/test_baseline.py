"""Against what a comparison states its numbers: dense where there is one, in any order; and which metric is where."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from sparsebp_cli.compare import Question, compare_runs
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder
from sparsebp_tools.release.figure import compare_here

MakeRun = Callable[..., RunFolder]
EXACT = [{"name": "lossless"}]
TOPK = {"policy": [{"name": "topk", "keep": 0.5}], "exact": False}


def test_the_baseline_is_dense_in_whatever_order_runs_are_named(make_run: MakeRun) -> None:
    runs = [make_run("mine", policy=EXACT), make_run("plain"), make_run("other", **TOPK)]
    for order in (runs, runs[::-1], [runs[1], runs[0], runs[2]]):
        found = compare_runs(order)
        assert found.groups[0].label == "plain"
        assert not [warning for warning in found.warnings if "baseline" in warning]


def test_the_card_of_an_exact_policy_says_what_the_comparison_with_dense_states(make_run: MakeRun) -> None:
    make_run("plain")
    run = make_run("mine", policy=EXACT)
    beside = compare_here(run, Plan.load(run.path / "plan.json"))
    assert beside.verdict.startswith("exact: what differs is rounding")


def test_the_card_of_a_copied_run_states_the_same(make_run: MakeRun) -> None:
    make_run("plain")
    run = make_run("mine", policy=EXACT)
    plan = Plan.load(run.path / "plan.json")
    copy = RunFolder(shutil.copytree(run.path, run.path.with_name("copy")))
    assert compare_here(copy, plan).verdict == compare_here(run, plan).verdict


def test_without_a_dense_run_or_with_several_the_baseline_is_named(make_run: MakeRun) -> None:
    none = compare_runs([make_run("mine", policy=EXACT), make_run("other", **TOPK)])
    assert any(warning.startswith("no run here is dense: the baseline is mine") for warning in none.warnings)
    several = [make_run("low", training={"learning_rate": 1e-4}), make_run("high", training={"learning_rate": 1e-2})]
    found = compare_runs([*several, make_run("other", **TOPK)])
    assert any(text.startswith("2 groups are dense: the baseline is low, not high") for text in found.warnings)
    asked = compare_runs([*several, make_run("other", **TOPK)], baseline="high")
    assert not any("groups are dense" in text for text in asked.warnings)


def test_a_dense_group_of_which_no_run_finished_is_not_the_baseline(make_run: MakeRun) -> None:
    lost = make_run("high", end="failed", text="diverged: loss is nan", training={"learning_rate": 1e-2})
    runs = [lost, make_run("low", training={"learning_rate": 1e-4}), make_run("other", **TOPK)]
    assert [group.label for group in compare_runs(runs).groups if group.baseline] == ["low"]
    assert [group.label for group in compare_runs([lost, runs[2]]).groups if group.baseline] == ["high"]


def test_a_study_that_is_not_over_says_what_its_statements_wait_for(make_run: MakeRun) -> None:
    runs = [make_run("plain", seed, loss=3.0 + seed / 100) for seed in range(3)]
    runs += [make_run("other", seed, **TOPK, loss=3.1 + seed / 99) for seed in range(3)]
    verdict = compare_runs(runs, Question(is_complete=False)).groups[1].verdict
    assert verdict.startswith("3 shared seeds, but some planned runs have not ended: no statement about quality")
