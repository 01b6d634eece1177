"""What keeps a comparison fair: controls, corrections, targets, examples, layers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from sparsebp_cli.compare import Comparison, Group, Question, compare_runs
from sparsebp_cli.recipe import load_stored
from sparsebp_cli.run import JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
RANDOM: dict[str, Any] = {"policy": [{"name": "random", "keep": 0.1, "along": "rows"}], "exact": False}
LOSSES = (3.00, 3.02, 2.98, 3.05, 2.97)


def group_named(comparison: Comparison, label: str) -> Group:
    return next(group for group in comparison.groups if group.label == label)


def seeds_of(make_run: MakeRun, name: str, extra: tuple[float, ...], **options: Any) -> list[RunFolder]:
    return [make_run(name, seed, loss=LOSSES[seed] + more, **options) for seed, more in enumerate(extra)]


# Controls


def test_missing_controls_are_named_with_the_commands_that_make_them(two_groups: list[RunFolder]) -> None:
    found = compare_runs(two_groups)
    assert [(c.kind, c.label, c.found) for c in found.controls] == [
        ("dense", "topk-rows", "dense"),
        ("random", "topk-rows", ""),
        ("fewer_steps", "topk-rows", ""),
        ("smaller_batch", "topk-rows", ""),
        ("own_learning_rate", "topk-rows", ""),
    ]
    missing = "dense with fewer steps, dense with a smaller batch, dense with another learning rate"
    assert f"not compared at equal cost with {missing}" in found.groups[1].verdict
    assert "not compared with random at the same budget" in found.groups[1].verdict
    run = shlex.split(found.controls[1].command)
    assert run[:3] == ["sparsebp", "run", "--like"]
    assert run[3] in {folder.run_id for folder in two_groups[5:]}
    stored = yaml.safe_load(two_groups[5].plan_file.read_text())["recipe"]
    made = load_stored(stored, "plan.json", [run[run.index("--set") + 1]]).recipe
    assert (
        made.policy[0].model_dump().items()
        >= {
            "name": "random",
            "keep": 0.1,
            "along": "rows",
        }.items()
    )
    assert run[run.index("--seeds") + 1] == "0,1,2,3,4"


def test_a_control_that_is_there_is_found_and_held_against_the_policy(make_run: MakeRun) -> None:
    runs = seeds_of(make_run, "dense", (0.0, 0.0, 0.0), seconds=0.2)
    runs += seeds_of(make_run, "topk", (0.10, 0.11, 0.12), **TOPK, executed=0.25)
    runs += seeds_of(make_run, "drawn", (0.05, 0.055, 0.06), **RANDOM, executed=0.25)
    runs += seeds_of(make_run, "short", (0.2, 0.22, 0.21), training={"max_steps": 11}, seconds=0.2, steps=11)
    found = compare_runs(runs, metric="train/loss")  # evaluated at step 11 as well
    mine = {c.kind: c for c in found.controls if c.label == "topk"}
    assert {kind: control.found for kind, control in mine.items() if control.found} == {
        "dense": "dense",
        "random": "drawn",
        "fewer_steps": "short",
    }
    assert not any(c.label in {"dense", "short"} for c in found.controls)


def test_what_tuning_chose_is_in_the_interval_of_every_control(make_run: MakeRun) -> None:
    """That of the arm and that of its control; of values that another arm tuned, that arm's, and once for both."""
    runs = seeds_of(make_run, "dense", (0.0, 0.0, 0.0), seconds=0.2)
    runs += seeds_of(make_run, "topk", (0.10, 0.11, 0.12), **TOPK, executed=0.25)
    runs += seeds_of(make_run, "short", (0.2, 0.22, 0.21), training={"max_steps": 10}, seconds=0.2, steps=10)
    errors, tuned_by = {"dense": 0.3, "topk": 0.4}, {name: (name,) for name in ("dense", "topk")}
    question = Question(choice={"eval/loss": errors}, tuned_by=tuned_by | {"short": ("dense",)})
    found = compare_runs(runs, question)
    controls = {c.found: c.difference for c in found.controls if c.difference is not None}
    assert {name: one.choice_error for name, one in controls.items()} == {"dense": 0.5}
    groups = {group.label: group.quality.difference for group in found.groups}
    assert groups["short"] is not None
    assert groups["topk"] is not None
    assert (groups["short"].choice_error, groups["topk"].choice_error) == (0.3, 0.5)
    incomplete = compare_runs(runs, replace(question, is_complete=False)).controls
    assert {c.difference.p for c in incomplete if c.difference is not None} == {None}


@pytest.mark.parametrize(
    "other",
    [
        {"policy": [{"name": "random", "keep": 0.2, "along": "rows"}]},
        {"policy": [{"name": "random", "keep": 0.1, "along": "columns"}]},
        {"policy": RANDOM["policy"], "training": {"learning_rate": 0.5}},
    ],
)
def test_random_at_another_budget_or_with_another_recipe_is_no_control(
    make_run: MakeRun, two_groups: list[RunFolder], other: dict[str, Any]
) -> None:
    runs = [*two_groups, make_run("random", exact=False, **other)]
    random = next(c for c in compare_runs(runs).controls if c.kind == "random")
    assert random.found == ""


def test_a_router_is_held_against_one_that_draws(make_run: MakeRun) -> None:
    router: dict[str, Any] = {"policy": [{"name": "max-child", "leaves": "always"}], "exact": False}
    drawn: dict[str, Any] = {"policy": [{"name": "random-child", "leaves": "always"}], "exact": False}
    missing = next(c for c in compare_runs([make_run(), make_run("r", **router)]).controls if c.kind == "random")
    assert """policy=[{"name": "random-child", "leaves": "always", "missing": "none"}]""" in missing.command
    found = compare_runs([make_run(), make_run("r", **router), make_run("d", **drawn)]).controls
    assert next(c for c in found if c.kind == "random").found == "d"
    assert "random" not in [c.kind for c in found if c.label == "d"]


def test_of_a_policy_that_is_not_installed_the_control_is_missing_without_a_command(make_run: MakeRun) -> None:
    gone: dict[str, Any] = {"policy": [{"name": "no-such-plugin", "keep": 0.1}], "exact": False}
    found = compare_runs([make_run(), make_run("g", **gone)])
    random = next(c for c in found.controls if c.kind == "random")
    assert (random.found, random.command) == ("", "")
    assert "not compared with random at the same budget" in found.groups[1].verdict


def test_the_command_of_a_random_control_has_no_option_that_is_gone(make_run: MakeRun) -> None:
    stored = {"name": "topk", "keep_warmup_steps": 0, "error_feedback": False, "keep": 0.25, "along": "rows"}
    found = compare_runs([make_run(), make_run("b", policy=[stored], exact=False)])
    command = next(control.command for control in found.controls if control.kind == "random")
    assert '"keep": 0.25' in command
    assert not {"keep_warmup_steps", "error_feedback"} & set(re.findall(r"\w+", command))


def test_means_over_other_seeds_than_the_differences_are_said_to_be(make_run: MakeRun) -> None:
    runs = [*seeds_of(make_run, "dense", (0.0,) * 3), make_run("b", 0, **TOPK)]
    warnings = compare_runs(runs).warnings
    assert any(
        "(dense: 0, 1, 2; b: 0): a difference uses the seeds that its two groups share" in one for one in warnings
    )


def test_a_policy_whose_step_costs_as_much_needs_no_dense_at_equal_cost(make_run: MakeRun) -> None:
    found = compare_runs([make_run(seconds=0.2), make_run("slow", **TOPK, seconds=0.1)])  # 1.0 of the FLOPs
    assert [c.kind for c in found.controls] == ["dense", "random"]
    assert (
        "the policy saves less than 2 % of a dense step, so no dense control at equal cost is needed"
        in found.groups[1].verdict
    )


def test_what_differs_beside_the_policy_is_named(make_run: MakeRun) -> None:
    found = compare_runs([make_run(), make_run("b", **TOPK, training={"learning_rate": 0.5, "max_grad_norm": None})])
    assert "b differs from the baseline in more than the policy: training.learning_rate, training.max_grad_norm" in (
        found.warnings
    )


def test_a_list_or_section_that_only_one_recipe_fills_differs_in_its_entries_alone(make_run: MakeRun) -> None:
    data = {"name": "d", "format": "completion"}
    more = {"backward": {"exclude": ["lm_head"]}, "dataset": data | {"columns": {"prompt": "q"}}}
    found = compare_runs([make_run(backward={"exclude": []}, dataset=data), make_run("b", **TOPK, **more)])
    changes = {change.key: (change.baseline, change.value) for change in found.groups[1].changes}
    assert changes["backward.exclude.0"] == (None, "lm_head")
    assert changes["dataset.columns.prompt"] == (None, "q")
    assert not {"backward.exclude", "dataset.columns"} & changes.keys()


# Several policies


def test_an_interval_that_excludes_zero_is_no_finding_after_the_correction(make_run: MakeRun) -> None:
    runs = seeds_of(make_run, "dense", (0.0,) * 3)
    shaky = (0.010, 0.020, 0.014)  # p is about 0.04 alone
    for number in range(3):
        extra = tuple(x * (1 + number / 10) for x in shaky)
        policy = [{"name": "topk", "keep": 0.1 * (number + 1), "along": "rows"}]
        runs += seeds_of(make_run, f"p{number}", extra, policy=policy, exact=False)
    alone = compare_runs(runs[:6]).groups[1]
    assert "eval/loss is worse" in alone.verdict
    together = group_named(compare_runs(runs), "p0")
    difference = together.quality.difference
    assert difference is not None
    assert difference.low is not None
    assert difference.p_holm is not None
    assert difference.low > 0.0
    assert difference.p_holm > 0.05
    assert together.verdict.startswith("no difference in eval/loss was shown")
    assert "(simultaneous 95% interval -0.010 to +0.039, 3 seeds)" in together.verdict


def test_seeds_that_are_in_no_pair_are_named(make_run: MakeRun) -> None:
    runs = seeds_of(make_run, "dense", (0.0,) * 5) + seeds_of(make_run, "topk", (0.1, 0.2, 0.1), **TOPK)
    difference = compare_runs(runs).groups[1].quality.difference
    assert difference is not None
    assert (difference.n, difference.dropped) == (3, (3, 4))


def test_steps_of_warm_up_count_as_long_as_the_others(make_run: MakeRun) -> None:
    seconds = compare_runs([make_run(seconds=0.2)]).groups[0].speed.training_seconds
    assert seconds is not None
    assert seconds.mean == pytest.approx(20 * 0.2, rel=0.02)  # the first three took 10 s each


# Examples


def with_examples(run: RunFolder, losses: list[float | None], targets: list[int] | None = None) -> RunFolder:
    with JournalWriter(run.path) as journal:
        journal.write("examples", step=20, values={"loss": losses, "targets": targets or [9] * len(losses)})
    return run


def test_two_models_are_compared_example_by_example_and_seeds_are_not_claimed(make_run: MakeRun) -> None:
    dense = with_examples(make_run(), [1.0, 2.0, 3.0, 4.0])
    sparse = with_examples(make_run("b", **TOPK), [1.1, 2.2, 3.1, 3.9])
    group = compare_runs([dense, sparse]).groups[1]
    assert [(e.seed, e.difference.n, e.worse_share) for e in group.quality.examples] == [(0, 4, 0.75)]
    assert group.quality.examples[0].difference.mean == pytest.approx(0.075)
    assert group.verdict.startswith(
        "one seed: no statement about quality; as a description of two models, not of other seeds: "
        "on 4 held-out examples in 3 blocks the model of seed 0 is not shown to differ"
    )


def test_examples_that_are_not_the_same_are_not_paired(make_run: MakeRun) -> None:
    dense = with_examples(make_run(), [1.0, 2.0, 3.0])
    others = [
        with_examples(make_run("a", **TOPK, facts={"dataset_digest": "other"}), [1.0, 2.0, 3.0]),
        with_examples(make_run("b", **RANDOM), [1.0, 2.0, 3.0], [9, 9, 8]),
        make_run("c", policy=[{"name": "topk", "keep": 0.5}], exact=False),
    ]
    assert all(not group.quality.examples for group in compare_runs([dense, *others]).groups)


def test_an_example_whose_loss_is_not_finite_is_left_out(make_run: MakeRun) -> None:
    dense = with_examples(make_run(), [1.0, 2.0, None, 4.0])
    sparse = with_examples(make_run("b", **TOPK), [1.1, 2.2, 3.0, 4.3])
    assert compare_runs([dense, sparse]).groups[1].quality.examples[0].difference.n == 3


# Layers


def test_layers_are_averaged_over_seeds_where_they_were_measured(make_run: MakeRun) -> None:
    runs = [make_run("topk", seed, **TOPK) for seed in range(2)]
    for run, share in zip(runs, (0.1, 0.3), strict=True):
        with JournalWriter(run.path) as journal:
            journal.write("layers", step=10, values={"a": {"kept_share": share, "cosine": None}, "b": {"cosine": 0.5}})
    with JournalWriter(runs[0].path) as journal:
        journal.write("layers", step=20, values={"a": {"kept_share": 0.7}})
    layers = compare_runs(runs).groups[0].layers
    assert (layers.steps, layers.names) == ((10, 20), ("a", "b"))
    assert layers.figures == {
        "kept_share": ((pytest.approx(0.2), 0.7), (None, None)),
        "cosine": ((None, None), (0.5, None)),
    }
    assert compare_runs([make_run()]).groups[0].layers.figures == {}


def test_the_claim_of_a_policy_that_changes_the_forward_too_is_that_of_its_proof(make_run: MakeRun) -> None:
    """A tenth of the backward is no policy's, a quarter of the rest is claimed; scoring doubles the forward."""
    proof = {
        "proof/claimed_share": 0.25,
        "proof/executed_share": 0.3,
        "flops/backward_executed": 0.1 * 2e9 + 0.3 * 1.8e9,
    }
    scored = {"flops/forward": 2e9, "speed/ceiling": 3e9 / (2e9 + 0.65e9), "proof/excess_share": 0.0}
    policy = [{"name": "tokens", "keep": 0.25, "score": "loss"}]
    found = compare_runs([make_run(), make_run("tokens", policy=policy, exact=False, metrics=proof | scored)])
    assert found.groups[1].cost.claimed_flops == pytest.approx(0.1 * 2e9 + 0.25 * 1.8e9)
    assert found.groups[0].cost.claimed_flops == pytest.approx(2e9)
