"""The leaderboard says what its runs say: data and page come again from them, statements are compare's."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.block import ROOT

# Version 0 changes no more, so its runs are compared where everything is: once, not once a process.
pytestmark = [pytest.mark.xdist_group("leaderboard"), pytest.mark.long]

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def leaderboard() -> ModuleType:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import leaderboard_v0 as leaderboard

    yield leaderboard
    patch.undo()


@pytest.fixture(scope="module")
def tasks(leaderboard):  # type: ignore[no-untyped-def]
    return [
        leaderboard.read_task(file)
        for file in leaderboard.find_studies()
        if leaderboard.has_archive(leaderboard.place_of(file))
    ]


def test_the_data_of_one_task_come_again_from_its_values(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    task = min(tasks, key=lambda task: len(task.comparison["runs"]))
    head, *rows = leaderboard.write_data([task]).splitlines()
    known_head, *known = (RESULTS / "leaderboard" / "v0.csv").read_text(encoding="utf-8").splitlines()
    assert head == known_head
    assert rows == [row for row in known if row.split(",")[0] == rows[0].split(",")[0]]
    assert len(rows) > 10


def test_data_and_page_come_again_from_the_values(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    assert tasks
    assert leaderboard.write_data(tasks) == (RESULTS / "leaderboard" / "v0.csv").read_text(encoding="utf-8")
    assert leaderboard.render(tasks) == (RESULTS / "leaderboard" / "v0.html").read_text(encoding="utf-8")


def test_every_statement_is_that_of_the_verdict_and_of_its_interval(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    assert tasks
    for task in tasks:
        for group in task.comparison["groups"]:
            row = leaderboard.make_row(task, group)
            if row["is_baseline"]:
                assert row["statement"] == "best dense"
                continue
            assert row["statement"]
            assert group["statements"][0]["outcome"] == row["statement"]
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
    rows = list(csv.DictReader((RESULTS / "leaderboard" / "v0.csv").read_text(encoding="utf-8").splitlines()))
    runs = [run for task in tasks for run in task.comparison["runs"] if run["counts"]]
    assert sorted(row["run"] for row in rows) == sorted(run["run_id"] for run in runs)
    by_id = {run["run_id"]: run for run in runs}
    for row in rows:
        assert float(row["quality"]) == by_id[row["run"]]["quality"]
        assert int(row["steps"]) == by_id[row["run"]]["steps"]


def test_every_arm_has_its_command_and_its_runs_on_the_page(tasks) -> None:  # type: ignore[no-untyped-def]
    page = (RESULTS / "leaderboard" / "v0.html").read_text(encoding="utf-8")
    for task in tasks:
        for group in task.comparison["groups"]:
            part = page.split(f'<details id="{task.name}-{group["label"]}">')[1].split("</details>")[0]
            assert "sparsebp run" in part
            assert all(run["run_id"] in part for run in task.comparison["runs"] if run["group"] == group["group"])


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = Path(RESULTS / "leaderboard" / "v0.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!#|\.\./leaderboard\.html")', page)


ANSWERS = (ROOT / "docs" / "guide" / "answers.md").read_text(encoding="utf-8")
GUIDE = " ".join((ROOT / "docs" / "results" / "standings.md").read_text(encoding="utf-8").split())
FIRST = ("quickstart", "masked", "far")


def test_what_cosine_and_noise_tell_of_the_loss_is_what_the_answer_says(tasks) -> None:  # type: ignore[no-untyped-def]
    from scipy import stats

    answer = " ".join(ANSWERS.split("**6. ")[1].split("**7. ")[0].split())
    of_cosine, of_noise = [], []
    for name in FIRST:
        task = next(task for task in tasks if task.name == name)
        known = [g for g in task.comparison["groups"] if g["cost"]["noise_ratio"] is not None and not g["exact"]]
        loss = [group["quality"]["final"]["mean"] for group in known]
        cosine, noise = ([group["cost"][key] for group in known] for key in ("cosine", "noise_ratio"))
        of_cosine.append(f"{stats.spearmanr(cosine, loss).statistic:.2f} ({name}, {len(known)}")
        of_noise.append(f"{stats.spearmanr(noise, loss).statistic:.2f}")
    assert f"{of_cosine[0]} methods), {of_cosine[1]}) and {of_cosine[2]})" in answer
    assert f"is {of_noise[0]}, {of_noise[1]} and {of_noise[2]}" in answer


def test_what_the_guide_says_of_small_batches_is_what_the_runs_say(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    said = []
    for name in FIRST:
        task = next(task for task in tasks if task.name == name)
        dense = leaderboard.find_dense(task.comparison["groups"])
        batch = {g["label"]: g["recipe"]["training"]["per_device_train_batch_size"] for g in dense}
        assert batch[task.baseline["label"]] == min(batch.values())
        largest = next(g for g in dense if g["label"] == "dense")
        assert batch["dense"] == max(batch.values())
        said.append(largest["statements"][0]["outcome"])
    assert said == ["no difference shown", "higher", "higher"]
    assert "In the second and the third it is lower than dense with the largest" in GUIDE
    assert "in the first no difference between the two is shown" in GUIDE


def test_approximations_had_one_batch_size_and_the_pages_say_so(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    for task in tasks:
        own = [g for g in task.comparison["groups"] if g["exact"] is False]
        assert len({g["recipe"]["training"]["per_device_train_batch_size"] for g in own}) == 1
        dense = leaderboard.find_dense(task.comparison["groups"])
        assert len({g["recipe"]["training"]["per_device_train_batch_size"] for g in dense}) in {2, 3, 4}
    pattern = r"[Nn]o (?:other )?approximation.{160}"
    sentences = [part for text in (ANSWERS, GUIDE) for part in re.findall(pattern, text, re.DOTALL)]
    assert len(sentences) == 2
    assert all("one batch size" in sentence for sentence in sentences)


def test_the_page_names_the_dense_rate_that_was_tried_after_the_study(leaderboard, tasks) -> None:  # type: ignore[no-untyped-def]
    near = next(task for task in tasks if task.name == "near")
    first, *others = leaderboard.describe_later(near)
    assert "rate of 0.00025 has 3.5354" in first
    assert any(text.startswith("top-half beside it: lower, -0.0309") for text in others)
    page = (RESULTS / "leaderboard" / "v0.html").read_text(encoding="utf-8")
    assert "3.5354" in page.split('<section><h2 id="near">')[1].split("</section>")[0]
