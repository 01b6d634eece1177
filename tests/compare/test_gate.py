"""``--fail-if``: what shuts the gate, and what cannot be said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, check, compare_runs
from sparsebp_cli.compare.gate import figures
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}


@pytest.fixture
def comparison(two_groups: list[RunFolder]) -> Comparison:
    """Of a policy that is worse by 0.104 and takes 0.65 of the time."""
    return compare_runs(two_groups, margin=0.2)


@pytest.mark.parametrize(
    ("condition", "shut"),
    [
        ("eval/loss.delta.high > 0.02", True),
        ("eval/loss.delta.high > 0.2", False),
        ("eval/loss.delta > 0.1 and time/step_seconds.ratio > 0.9", False),
        ("time/step_seconds.ratio.high < 0.7", True),
        ("margin.answer != yes", False),
        ("topk-rows:eval/loss.mean > 3 and dense:eval/loss.mean > 3", True),
        ("topk-rows:eval/loss.mean > 9", False),
        ("runs.not_finished > 0", False),
        ("eval/loss.delta.p < 0.05 or speed/ceiling < 1", True),
        ("memory/held_bytes.ratio > 1.01", False),
        ("outcome = worse", False),
        ("outcome = 'equal within the margin'", True),
    ],
)
def test_a_gate_is_shut_by_the_numbers(comparison: Comparison, condition: str, shut: bool) -> None:
    assert bool(check(comparison, condition)) is shut


def test_the_failure_says_which_group_and_which_number(comparison: Comparison) -> None:
    assert [failure.text for failure in check(comparison, "eval/loss.delta.high > 0.02")] == [
        "topk-rows: eval/loss.delta.high is 0.1182: eval/loss.delta.high > 0.02"
    ]


def test_a_number_that_is_not_there_cannot_pass(make_run: MakeRun) -> None:
    found = compare_runs([make_run(), make_run("b", **TOPK)])
    for condition in ("eval/loss.delta.high > 0.02", "eval/loss.delta.high < 0.02", "margin.answer = no"):
        failures = check(found, condition)
        assert len(failures) == 1
        assert "b: cannot be decided" in failures[0].text
        assert "is not known" in failures[0].text
    assert check(found, "eval/loss.delta.high > 0.02 and runs.finished < 1") == []


def test_every_group_but_the_baseline_is_asked(make_run: MakeRun) -> None:
    other = {"policy": [{"name": "random", "keep": 0.5}], "exact": False}
    found = compare_runs([make_run(), make_run("b", **TOPK, loss=4.0), make_run("c", **other, loss=2.0)])
    assert [failure.label for failure in check(found, "eval/loss.delta > 0.5")] == ["b"]


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (
            "eval/loss.delta.hi > 1",
            r"unknown number 'eval/loss.delta.hi', allowed: .*did you mean eval/loss.delta",
        ),
        ("nobody:eval/loss.mean > 1", "no group is called 'nobody'; the groups are dense, topk-rows"),
        ("dense:eval/loss.mean > 1 and eval/loss.mean > 1", "write 'GROUP:' before every name"),
        ("eval/loss.delta.high", "expected one of"),
    ],
)
def test_a_wrong_condition_is_refused_in_one_line(comparison: Comparison, condition: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        check(comparison, condition)
    assert str(caught.value).startswith("--fail-if: " if "name the" not in says else "--fail-if")


def test_a_gate_without_anything_to_hold_against_the_baseline_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="needs a group to check, but only the baseline was selected"):
        check(compare_runs([make_run()]), "eval/loss.mean > 1")


def test_every_figure_has_a_value_or_none_for_every_group(comparison: Comparison) -> None:
    for group in comparison.groups:
        assert all(
            value is None or isinstance(value, int | float | str) for value in figures(comparison, group).values()
        )


def test_a_gate_reads_the_interval_and_the_mean_that_the_table_prints(make_run: MakeRun) -> None:
    def runs(name: str, losses: tuple[float, ...], **options: Any) -> list[RunFolder]:
        return [make_run(name, seed, loss=loss, **options) for seed, loss in enumerate(losses)]

    groups = [runs("dense", (3.0, 3.01, 3.02)), runs("topk-rows", (3.06, 3.11, 3.07, 9.0), **TOPK)]
    groups.append(runs("other", (3.02, 3.0, 3.05), policy=[{"name": "random", "keep": 0.1}], exact=False))
    found = compare_runs([run for group in groups for run in group])
    group = next(group for group in found.groups if group.label == "topk-rows")
    assert group.quality.difference is not None
    low, high = group.quality.difference.shown
    values = figures(found, group)
    assert (values["eval/loss.delta.low"], values["eval/loss.delta.high"]) == (low, high)
    assert high is not None
    assert group.quality.difference.high is not None
    assert high > group.quality.difference.high
    assert values["eval/loss.mean"] == pytest.approx(3.08)  # of the seeds that all groups have
    assert values["eval/loss.n"] == 3


def test_a_value_that_is_not_a_number_is_missing(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.compare.gate.figures", lambda *_: {"eval/loss.delta.high": float("nan")})
    assert "cannot be decided" in check(comparison, "eval/loss.delta.high > 0.02")[0].text
