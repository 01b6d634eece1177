"""Where numbers say less than they seem to, the verdict says less too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, Group, Question, check, compare_runs
from sparsebp_cli.compare.choose import find_outcomes
from sparsebp_cli.compare.load import load
from sparsebp_cli.compare.question import label_groups
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}


def pair(make_run: MakeRun, **of_topk: Any) -> list[RunFolder]:
    """Three seeds of dense, and of a policy that is better by about 1."""
    dense = [make_run("dense", seed, loss=3.0 + 0.1 * seed, facts={"eval_examples": 73}) for seed in range(3)]
    values = {"facts": {"eval_examples": 73}} | of_topk
    return dense + [make_run("topk", seed, loss=2.0 + 0.13 * seed, **TOPK, **values) for seed in range(3)]


def sparse(found: Comparison) -> Group:
    return next(group for group in found.groups if group.label == "topk")


def test_losses_on_other_held_out_examples_are_no_difference_of_the_models(make_run: MakeRun) -> None:
    runs = pair(make_run, facts={"eval_examples": 7})
    found = compare_runs(runs, Question(margin=0.5))
    group = sparse(found)
    assert group.quality.difference is None
    assert group.quality.not_worse is None
    assert group.verdict.startswith("evaluated on other examples than the baseline: no statement about quality; ")
    assert "topk was evaluated on other examples than dense, so it is not compared" in found.warnings
    assert "cannot be decided" in check(found, "eval/loss.delta.high > 0.02")[0].text


def test_other_training_data_stands_among_what_could_explain_a_difference(
    make_run: MakeRun,
) -> None:
    runs = pair(make_run, facts={"eval_examples": 73, "dataset_digest": "xyz"})
    for run in runs:
        with JournalWriter(run.path) as journal:
            journal.write("examples", step=20, values={"loss": [1.0, 2.0, 3.0], "targets": [9, 8, 7]})
    found = compare_runs(runs)
    assert sparse(found).quality.difference is not None
    assert [confound.name for confound in found.confounds] == ["dataset digest"]


def test_as_many_examples_of_other_lengths_are_other_examples(make_run: MakeRun) -> None:
    runs = pair(make_run)
    for number, run in enumerate(runs):
        with JournalWriter(run.path) as journal:
            journal.write("examples", step=20, values={"loss": [1.0, 2.0, 3.0], "targets": [9, 8, 7 + number // 3]})
    assert sparse(compare_runs(runs)).quality.difference is None


def test_step_times_of_another_machine_are_said_to_be_that(make_run: MakeRun) -> None:
    elsewhere = {"facts": {"device": "cuda"}, "environment": {"gpu": "H200"}, "seconds": 0.01}
    text = sparse(compare_runs(pair(make_run, **elsewhere))).verdict
    assert "the step times are of different hardware (device), which can explain the whole difference" in text
    assert "hardware" not in sparse(compare_runs(pair(make_run, seconds=0.01))).verdict


def test_a_run_that_diverged_is_told_apart_from_one_that_did_not_finish(make_run: MakeRun) -> None:
    runs = pair(make_run)
    runs += [make_run("topk", 7, loss=float("nan"), **TOPK), make_run("topk", 8, end="failed", steps=10, **TOPK)]
    text = sparse(compare_runs(runs)).verdict
    assert text.endswith("1 run did not finish, 1 run diverged, so the quality is of the other runs only.")


@pytest.mark.parametrize("value", [1e308, -1e300])
def test_a_loss_whose_square_is_no_number_has_diverged_and_breaks_nothing(make_run: MakeRun, value: float) -> None:
    runs = pair(make_run, metrics={"eval/loss": value})
    group = sparse(compare_runs(runs))
    assert group.quality.final is None
    assert "3 runs diverged" in group.verdict


def test_runs_chosen_by_their_result_are_known_to_be(make_run: MakeRun) -> None:
    assert find_outcomes("eval/loss<3 and seed<5 or not (state=failed or eval/loss>9)") == ["eval/loss", "state"]
    assert find_outcomes("policy=topk and tag.a/b=c and keep<0.2") == []


def test_groups_of_one_name_are_told_apart_and_each_label_is_a_baseline(make_run: MakeRun) -> None:
    runs = []
    for number in range(3):
        entry = [{"name": "topk", "keep": 0.1 * (number + 1), "along": "rows"}]
        runs.append(make_run("topk", policy=entry, exact=False))
    found = compare_runs(runs)
    label = found.groups[2].label
    assert compare_runs(runs, baseline=label).groups[0].group == found.groups[2].group
    with pytest.raises(UsageError, match=rf"--baseline 'topk' names 3 groups.*{label}"):
        compare_runs(runs, baseline="topk")


def test_labels_are_unique_and_short(make_run: MakeRun) -> None:
    run = load([make_run("dense")])[0]
    members = {f"abcd{n:04x}": [replace(run, name="same")] for n in range(300)} | {"ffff": [run]}
    labels = label_groups(members)
    assert len(set(labels.values())) == len(members)
    assert labels["ffff"] == "dense"
    assert max(map(len, labels.values())) == len("same#abcd0000")


def test_another_census_of_the_data_is_a_confound_with_its_numbers(make_run: MakeRun) -> None:
    def census(dropped: int) -> dict[str, object]:
        split = {
            "rows": 90,
            "examples": 90 - dropped,
            "dropped": {"x": dropped},
            "cut": 0,
            "tokens": 900,
            "targets": 90,
        }
        return {"splits": {"train": split}, "shared": {}}

    runs = [make_run("dense", seed, facts={"census": census(0)}) for seed in range(3)]
    runs += [make_run("topk", seed, facts={"census": census(7)}, **TOPK) for seed in range(3)]
    found = {confound.name: confound.values for confound in compare_runs(runs).confounds}
    assert [value for value, _ in found["data census"]] == [
        "train 90 of 90 rows (0 dropped, 0 cut), 900 tokens, 90 targets",
        "train 83 of 90 rows (7 dropped, 0 cut), 900 tokens, 90 targets",
    ]
