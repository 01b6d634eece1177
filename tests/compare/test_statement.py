"""What is stated is data: outcomes by numbers, intervals that agree with their p, and nothing that is withheld."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, Group, Question, compare_runs
from sparsebp_cli.compare.family import correct_all
from sparsebp_cli.compare.report.headline import make_headline
from sparsebp_cli.compare.statement import Outcome, Statement, is_shown
from sparsebp_cli.compare.statistics import Difference, summarise, summarise_clusters
from sparsebp_cli.compare.verdict import differs
from sparsebp_cli.compare.words import say, say_all
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
LOSSLESS: dict[str, Any] = {"policy": [{"name": "lossless"}], "exact": True}


def of(found: Comparison, label: str) -> Group:
    return next(group for group in found.groups if group.label == label)


def outcome(group: Group) -> Outcome:
    statement = group.find("quality")
    assert statement is not None
    return statement.outcome


def test_a_policy_that_declares_itself_exact_and_is_not_is_a_fault_named_first(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0 + 0.01 * seed) for seed in range(3)]
    runs += [make_run("broken", seed, loss=3.4 + 0.012 * seed, **LOSSLESS) for seed in range(3)]
    runs += [make_run("same", seed, loss=3.0 + 0.01 * seed, **TOPK) for seed in range(3)]
    other = TOPK | {"policy": [{"name": "topk", "keep": 0.5}]}
    runs += [make_run("worse", seed, loss=3.5 + 0.011 * seed, **other) for seed in range(3)]
    found = compare_runs(runs)
    assert [outcome(group) for group in found.groups[1:]] == ["fault", "identical", "worse"]
    assert make_headline(found) == "Against dense in eval/loss: fault: broken; identical: same; worse: worse."


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ([3.4], "fault"),  # one seed: by its size alone
        ([3.05], "exact"),  # 1.7 % in one seed is what training made of a rounding of 4e-7
        ([3.0, 3.0, 3.0], "exact"),
        ([3.05, 2.97, 3.02], "exact"),
        ([3.4, 3.41, 3.42], "fault"),
        ([3.9, 2.9, 3.1], "no difference shown"),  # neither rounding nor shown to be more
    ],
)
def test_what_an_exact_policy_is_off_by_decides_what_is_said(
    make_run: MakeRun, losses: list[float], wanted: str
) -> None:
    runs = [make_run("dense", seed, loss=3.0 + 1e-9 * seed) for seed in range(len(losses))]
    runs += [make_run("exact", seed, loss=loss, **LOSSLESS) for seed, loss in enumerate(losses)]
    assert outcome(compare_runs(runs).groups[1]) == wanted


def test_statements_are_frozen_and_the_verdict_is_their_words(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0) for seed in range(3)]
    found = compare_runs(runs + [make_run("topk", seed, loss=3.2 + 0.01 * seed, **TOPK) for seed in range(3)])
    for group in found.groups:
        assert group.verdict == say_all(group.statements)
        with pytest.raises(FrozenInstanceError):
            group.statements[0].outcome = "better"  # type: ignore[misc]


def test_an_interval_has_zero_inside_exactly_where_no_difference_is_stated() -> None:
    """Of the step that two groups share, of controls and of held-out examples: 20 of 60 had it outside."""
    draw, seen = random.Random(0), set[bool]()
    for _ in range(200):
        some = [
            summarise([draw.gauss(shift, 0.3) for _ in range(draw.choice((3, 5)))])
            for shift in (draw.choice((0.0, 0.5)) for _ in range(draw.choice((1, 2, 6))))
        ]
        clusters = [n // 4 for n in range(24)]
        some.append(summarise_clusters([draw.gauss(0.2, 0.5) for _ in clusters], clusters))
        for difference in correct_all(some):
            assert difference is not None
            low, high = difference.shown
            assert low is not None
            assert high is not None
            assert differs(difference) == (not low < 0.0 < high)
            seen.add(differs(difference))
    assert seen == {True, False}


def test_an_end_that_holm_closed_at_zero_stands_beside_its_p() -> None:
    closed = Difference(-0.2, -0.4, 0.01, 3, 0.05, 0.02, 0.04, family_low=-0.45, family_high=0.0)
    from sparsebp_cli.compare.statement import Number

    number = Number.of("eval/loss", closed)
    assert is_shown(number)
    said = say(Statement("lower", "quality", (number,), ("with 2 steps against 1 of the baseline",)))
    assert "0.00, p = 0.04, 3 seeds)" in said


def test_runs_further_apart_than_the_policy_can_save_drifted(make_run: MakeRun) -> None:
    share = {"claimed": 0.2, "executed": 0.2}  # 3 / 1.4: a limit of 2.14
    for seconds, drifted in ((0.06, True), (0.12, False)):
        runs = [make_run("dense", seed, seconds=0.2) for seed in range(3)]
        found = compare_runs(runs + [make_run("topk", seed, seconds=seconds, **share, **TOPK) for seed in range(3)])
        group = of(found, "topk")
        assert (group.speed.step_ratio is None) is drifted
        assert ("more than the policy can save, at most -53 %" in group.verdict) is drifted
        assert ("step time -40.0 %" in group.verdict) is not drifted
        assert "-70" not in group.verdict


def test_the_memory_of_a_process_is_compared_with_nothing(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed) for seed in range(3)]
    group = of(compare_runs(runs + [make_run("topk", seed, **TOPK) for seed in range(3)]), "topk")
    assert (group.cost.peak_bytes, group.cost.peak_of) == (1.2e9, "process")
    assert group.cost.held_ratio is not None
    assert group.cost.held_ratio.mean == 1.0
    assert group.find("memory") is None


def test_survivors_of_a_divergence_show_no_gain(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0 + 0.01 * seed) for seed in range(5)]
    losses = [2.5, 2.52, 2.51, float("nan"), float("nan")]
    runs += [make_run("topk", seed, loss=loss, **TOPK) for seed, loss in enumerate(losses)]
    found = compare_runs(runs, Question(margin=0.1))
    assert outcome(of(found, "topk")) == "no statement"
    assert [run.excluded for run in found.runs if not run.counts] == ["diverged", "diverged"]
