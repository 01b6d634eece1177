"""Dense at equal cost: what a step costs, what makes a run a control, and which of several counts."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, Group, compare_runs
from sparsebp_cli.compare.cost import is_near, whole
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.run import JournalWriter, RunFolder

from .conftest import MakeRun

TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
LOSSES = (3.00, 3.02, 2.98)
BATCH = {"per_device_train_batch_size": 16}


def probes(ratio: float, dense: float = 1.0) -> dict[str, Any]:
    """Every probe finds forward and backward at this share of dense."""
    return {"metrics": {"probe/dense_seconds": dense, "probe/policy_seconds": ratio * dense}}


def seeds(make_run: MakeRun, name: str, extra: tuple[float, ...], **options: Any) -> list[RunFolder]:
    training = BATCH | options.pop("training", {})
    return [make_run(name, s, loss=LOSSES[s] + x, training=training, **options) for s, x in enumerate(extra)]


def study(make_run: MakeRun, ratio: float = 0.5) -> list[RunFolder]:
    """Dense of 20 steps of 16 examples, and a policy at half of its cost that is worse by 0.1."""
    runs = seeds(make_run, "dense", (0.0, 0.0, 0.0), **probes(1.03))
    return runs + seeds(make_run, "topk", (0.10, 0.11, 0.12), **TOPK, executed=0.4, **probes(ratio))


def small(make_run: MakeRun, name: str, size: int, extra: tuple[float, ...], **options: Any) -> list[RunFolder]:
    training = {"per_device_train_batch_size": size} | options.pop("training", {})
    return seeds(make_run, name, extra, training=training, **probes(0.97), **options)


def group_named(comparison: Comparison, label: str) -> Group:
    return next(group for group in comparison.groups if group.label == label)


def controls(comparison: Comparison) -> dict[str, tuple[str, bool]]:
    return {c.kind: (c.found, c.is_best) for c in comparison.controls if c.label == "topk"}


# What a step costs


def test_a_steps_cost_is_the_probes_ratio_and_no_wall_changes_it(make_run: MakeRun) -> None:
    """Two groups of the same work got -13 % and +21 % by their walls."""
    runs = study(make_run)
    again = TOPK | {"policy": [{"name": "topk", "keep": 0.11, "along": "rows"}]}
    runs += seeds(make_run, "again", (0.2, 0.2, 0.21), **again, executed=0.4, seconds=5.0, **probes(0.5))
    first, second = (group_named(compare_runs(runs), name).speed for name in ("topk", "again"))
    assert (first.step_cost, first.cost_by) == (second.step_cost, "probe")
    assert first.step_cost == pytest.approx((8 + 8 / 9) / (16 + 8 / 9))  # the update is a ninth of the passes


def test_dense_costs_one_dense_step_whatever_its_own_probe_says(make_run: MakeRun) -> None:
    speed = compare_runs(study(make_run)).groups[0].speed
    assert (speed.step_cost, speed.cost_by) == (1.0, "dense")


def test_without_a_probe_the_counted_flops_tell_the_cost(make_run: MakeRun) -> None:
    runs = [make_run(), make_run("topk", **TOPK, executed=0.25)]
    speed = compare_runs(runs).groups[1].speed
    assert speed.cost_by == "flops"
    assert speed.step_cost == pytest.approx((0.5 * 10 / 9) / (1 + 0.5 / 9))


def test_where_nothing_tells_the_cost_the_verdict_says_so(make_run: MakeRun) -> None:
    gone = {"flops/forward": float("nan"), "flops/backward_executed": float("nan"), "flops/backward_dense": 0.0}
    found = compare_runs([*study(make_run)[:3], *seeds(make_run, "topk", (0.1, 0.1, 0.11), **TOPK, metrics=gone)])
    assert "no probe measured the cost of a step, so no dense run of equal cost is known" in found.groups[1].verdict


# What makes a run a control


def test_dense_with_less_cost_than_the_policy_is_never_a_control(make_run: MakeRun) -> None:
    runs = study(make_run, 0.6) + small(make_run, "less", 9, (0.5, 0.5, 0.51))
    assert controls(compare_runs(runs))["smaller_batch"] == ("", False)
    runs = study(make_run, 0.6) + small(make_run, "enough", 10, (0.5, 0.5, 0.51))
    assert controls(compare_runs(runs))["smaller_batch"][0] == "enough"


def test_the_nearest_by_cost_is_taken_whatever_the_order_of_the_arguments(make_run: MakeRun) -> None:
    near = small(make_run, "near", 16, (0.3, 0.3, 0.31), training={"max_steps": 11}, steps=20)
    far = small(make_run, "far", 16, (0.0, 0.0, 0.01), training={"max_steps": 12}, steps=20)
    for more in ([*near, *far], [*far, *near]):
        assert controls(compare_runs([*study(make_run), *more]))["fewer_steps"][0] == "near"


@pytest.mark.parametrize(
    ("cost", "one_less", "near"),
    [(0.999, 0.9, False), (1.0, 0.99, True), (1.02, 1.01, True), (1.021, 1.01, False), (1.3, 0.98, True)],
)
def test_a_control_costs_as_much_and_two_percent_more_at_most(cost: float, one_less: float, near: bool) -> None:
    assert is_near(cost, one_less) is near


@pytest.mark.parametrize("needed", [0.3, 1.0, 7.36, 12.95, 86.0, 86.7, 1000.2])
def test_what_is_asked_for_is_near_and_leaves_room_for_the_next_probe(needed: float) -> None:
    asked = whole(needed)
    assert is_near(asked / needed, (asked - 1) / needed)
    assert asked >= needed * 1.005 or asked == max(1, -(-needed // 1))


def test_a_control_has_a_batch_steps_and_a_learning_rate_of_its_own(make_run: MakeRun) -> None:
    """A tuned arm: its dense has another learning rate, batch and warm-up, and is found all the same."""
    options = {"learning_rate": 3e-3, "warmup_steps": 2}
    runs = study(make_run) + small(make_run, "tuned", 8, (0.05, 0.05, 0.06), training=options)
    found = compare_runs(runs)
    assert controls(found)["own_learning_rate"] == ("tuned", True)
    cost = next(c.cost for c in found.controls if c.found == "tuned")
    assert cost == pytest.approx(1.0)


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"name": "another"}},
        {"dataset": {"name": "another"}},
        {"facts": {"dataset_digest": "other"}},
        {"facts": {"eval_examples": 7}},
        {"policy": [{"name": "topk", "keep": 0.5, "along": "rows"}], "exact": False},
    ],
)
def test_another_model_data_evaluation_or_an_inexact_policy_is_no_control(
    make_run: MakeRun, other: dict[str, Any]
) -> None:
    runs = study(make_run)
    if "eval_examples" in other.get("facts", {}):
        runs = seeds(make_run, "topk", (0.1, 0.1, 0.1), **TOPK, facts={"eval_examples": 9}, **probes(0.5))
    runs += small(make_run, "other", 8, (0.0, 0.0, 0.01), **other)
    assert controls(compare_runs(runs))["smaller_batch"] == ("", False)


def test_fewer_examples_are_asked_for_only_where_data_are_seen_again(make_run: MakeRun) -> None:
    few, many = {"train_examples": 100}, {"train_examples": 100_000}
    for facts, kinds in ((few, 1), (many, 0)):
        runs = seeds(make_run, "topk", (0.1, 0.1, 0.11), **TOPK, facts=facts, **probes(0.5))
        found = [c for c in compare_runs(runs).controls if c.kind == "fewer_examples"]
        assert len(found) == kinds
        if found:
            assert "--set training.max_steps=11 --set dataset.max_train_examples=55" in found[0].command


# Which of them counts


def test_the_best_dense_of_equal_cost_is_named_with_its_cost_and_the_missing_ones(make_run: MakeRun) -> None:
    """Dense with fewer steps was even; with a smaller batch, at the same cost, it was far better."""
    runs = study(make_run) + small(make_run, "dense-b8", 8, (-0.10, -0.11, -0.10))
    runs += small(make_run, "dense-11", 16, (0.10, 0.11, 0.13), training={"max_steps": 11}, steps=20)
    found = compare_runs(runs)
    assert controls(found)["smaller_batch"] == ("dense-b8", True)
    assert controls(found)["fewer_steps"] == ("dense-11", False)
    verdict = group_named(found, "topk").verdict
    said = "worse than the best dense of equal cost, dense with a smaller batch (dense-b8, 1.00x the policy's cost, "
    assert f"{said}timed in turns), by 0.213" in verdict
    assert "not compared at equal cost with dense with another learning rate" in verdict


def test_the_best_control_is_chosen_on_the_seeds_that_it_shares(make_run: MakeRun) -> None:
    """A control with easy seeds that the policy never had is not better for them."""
    runs = study(make_run) + small(make_run, "dense-b8", 8, (0.0, 0.01, 0.0))
    easy = small(make_run, "dense-11", 16, (0.2, 0.21, 0.2), training={"max_steps": 11}, steps=20)
    easy += [
        make_run("dense-11", seed, loss=1.0, training=BATCH | {"max_steps": 11}, **probes(1.0)) for seed in (7, 8, 9)
    ]
    assert controls(compare_runs([*runs, *easy]))["smaller_batch"] == ("dense-b8", True)


def test_every_missing_control_comes_with_a_command_that_makes_it(make_run: MakeRun) -> None:
    runs = seeds(
        make_run, "topk", (0.1, 0.1, 0.11), **TOPK, training={"warmup_steps": 4, "learning_rate": 1e-3}, **probes(0.5)
    )
    made = {c.kind: shlex.split(c.command) for c in compare_runs(runs).controls}
    sets = {kind: [words[i + 1] for i, w in enumerate(words) if w == "--set"] for kind, words in made.items()}
    assert sets["fewer_steps"] == ["policy=dense", "training.max_steps=11", "training.warmup_steps=2"]
    assert sets["smaller_batch"] == ["policy=dense", "training.per_device_train_batch_size=8"]
    assert sets["own_learning_rate"][-1] == "training.learning_rate=0.002"
    assert all(words[:3] == ["sparsebp", "run", "--like"] for words in made.values())
    assert all(words[-2:] == ["--seeds", "0,1,2"] for words in made.values())
    assert made["smaller_batch"][made["smaller_batch"].index("--name") + 1] == "dense-batch-8"


def test_an_exact_policy_needs_no_control_and_may_be_one(make_run: MakeRun) -> None:
    exact: dict[str, Any] = {"policy": [{"name": "tokens", "score": "mask"}], "executed": 0.4}
    runs = study(make_run) + seeds(make_run, "exact", (0.0, 0.0, 0.01), **exact, **probes(0.5))
    found = compare_runs(runs)
    assert {c.label for c in found.controls} == {"topk"}
    assert controls(found)["fewer_steps"][0] == "exact"


# Pair by pair


def test_a_short_group_changes_nobody_elses_numbers(make_run: MakeRun) -> None:
    runs = study(make_run)
    before = group_named(compare_runs(runs), "topk").quality
    short = small(make_run, "short", 16, (0.5, 0.5, 0.51), training={"max_steps": 10}, steps=10)
    after = group_named(compare_runs([*runs, *short]), "topk").quality
    assert before.at_equal
    assert after.at_equal == before.at_equal
    assert after.final == before.final


def test_at_equal_cost_the_dearer_group_is_judged_by_an_earlier_evaluation(make_run: MakeRun) -> None:
    entry = group_named(compare_runs(study(make_run)), "topk").quality.at_equal[0]
    assert (entry.other, entry.by) == ("dense", "cost")
    assert entry.amount == pytest.approx(20 * (8 + 8 / 9) / (16 + 8 / 9))
    assert entry.quality is not None
    assert entry.others is not None
    assert entry.others.mean == pytest.approx(4.0)  # its value after 10 of 20 steps
    assert entry.quality.mean == pytest.approx(3.11)


def test_models_that_differ_are_held_against_each_other_after_equal_time(make_run: MakeRun) -> None:
    runs = [make_run(seconds=2.0), make_run("other", model={"name": "other"}, seconds=1.0)]
    entry = compare_runs(runs).groups[1].quality.at_equal[0]
    assert entry.by == "time"
    assert entry.amount == pytest.approx(20, rel=0.03)
    assert entry.others is not None
    assert entry.others.mean == pytest.approx(4.0)


def test_an_evaluation_far_before_the_equal_cost_stands_for_nothing(make_run: MakeRun) -> None:
    runs = [make_run(seconds=4.0), make_run("other", model={"name": "other"}, seconds=1.0)]
    found = compare_runs(runs)  # after 20 s dense was at step 5, and evaluated at 0 and 10
    entry = found.groups[1].quality.at_equal[0]
    assert (entry.quality, entry.others, entry.difference) == (None, None, None)
    grid = next(grid for grid in grids(found) if grid.title.startswith("At equal cost"))
    assert grid.rows[0][3:] == ("-", "-", "-")
    assert "was not evaluated near this cost" in grid.note


def test_the_best_control_is_chosen_on_validation_and_reported_on_test(make_run: MakeRun) -> None:
    def tested(runs: list[RunFolder], loss: float) -> list[RunFolder]:
        for number, run in enumerate(runs):
            with JournalWriter(run.path, durable=False) as journal:
                journal.write("metrics", step=20, values={"test/loss": loss + number / 100})
        return runs

    runs = study(make_run)
    runs = [*tested(runs[:3], 3.0), *tested(runs[3:], 3.1)]
    runs += tested(small(make_run, "dense-b8", 8, (-0.2, -0.21, -0.2)), 3.3)  # the best by validation
    runs += tested(small(make_run, "dense-b8-lr", 8, (0.0, 0.0, 0.01), training={"learning_rate": 1.0}), 2.5)
    found = compare_runs(runs)
    assert found.metric == "test/loss"
    assert controls(found)["smaller_batch"] == ("dense-b8", True)
    difference = next(c.difference for c in found.controls if c.kind == "smaller_batch")
    assert difference is not None
    assert difference.mean == pytest.approx(-0.2)
