"""The leaderboard says what its archived runs say: data and page come again from them, statements are compare's."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import ModuleType

import pytest

from sparsebp_cli.compare.verdict import find_outcome
from tests.docs.block import ROOT

pytestmark = pytest.mark.xdist_group("leaderboard")  # the archives are compared once, not once a process

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def leaderboard() -> ModuleType:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import leaderboard

    yield leaderboard
    patch.undo()


@pytest.fixture(scope="module")
def tasks(leaderboard):  # type: ignore[no-untyped-def]
    return [leaderboard.read_task(file) for file in leaderboard.find_studies() if leaderboard.archive_of(file).exists()]


def test_data_and_page_come_again_from_the_archives(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    assert tasks
    assert leaderboard.write_data(tasks) == (RESULTS / "leaderboard.csv").read_text(encoding="utf-8")
    assert leaderboard.render(tasks) == (RESULTS / "leaderboard.html").read_text(encoding="utf-8")


def test_every_statement_is_that_of_the_verdict_and_of_its_interval(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    assert tasks
    for task in tasks:
        for group in task.comparison["groups"]:
            row = leaderboard.make_row(task, group)
            if row["is_baseline"]:
                assert row["statement"] == "best dense"
                continue
            assert row["statement"]
            assert find_outcome(group["verdict"]).startswith(row["statement"])
            low, high = row["difference"]["family_low"], row["difference"]["family_high"]
            if row["statement"] in ("lower", "higher"):  # what is said, the interval says too
                assert (high <= 0) == (row["statement"] == "lower"), group["label"]
                assert (low >= 0) == (row["statement"] == "higher"), group["label"]


def test_the_baseline_is_the_best_dense_arm_on_validation_at_no_more_than_the_cost(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    assert tasks
    for task in tasks:
        paid = task.study["budget"]["steps"]
        for group in task.comparison["groups"]:
            assert leaderboard.cost_of(task, group) <= 1.15 * paid, "timed again inside the runs"
        assert task.baseline in leaderboard.find_dense(task.comparison["groups"])
        assert len(leaderboard.find_dense(task.comparison["groups"])) > 1


def test_the_data_has_a_row_for_every_run_with_its_recipes_numbers(tasks) -> None:  # type: ignore[no-untyped-def]
    rows = list(csv.DictReader((RESULTS / "leaderboard.csv").read_text(encoding="utf-8").splitlines()))
    runs = [run for task in tasks for run in task.comparison["runs"] if run["counts"]]
    assert sorted(row["run"] for row in rows) == sorted(run["run_id"] for run in runs)
    by_id = {run["run_id"]: run for run in runs}
    for row in rows:
        assert float(row["quality"]) == by_id[row["run"]]["quality"]
        assert int(row["steps"]) == by_id[row["run"]]["steps"]


def test_every_arm_has_its_command_and_its_runs_on_the_page(tasks) -> None:  # type: ignore[no-untyped-def]
    page = (RESULTS / "leaderboard.html").read_text(encoding="utf-8")
    for task in tasks:
        for group in task.comparison["groups"]:
            part = page.split(f'<details id="{task.name}-{group["label"]}">')[1].split("</details>")[0]
            assert "sparsebp run" in part
            assert all(run["run_id"] in part for run in task.comparison["runs"] if run["group"] == group["group"])


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = Path(RESULTS / "leaderboard.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!#)', page)
