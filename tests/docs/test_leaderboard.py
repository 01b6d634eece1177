"""The leaderboard, version 1: page and data come again from what is archived, and its studies keep its rules."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sparsebp_lab.leaderboard.check import check_study
from sparsebp_lab.leaderboard.rules import load_board
from sparsebp_lab.leaderboard.submission import own_task
from sparsebp_lab.study.loader import load_study
from tests.docs.block import ROOT

RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "leaderboard" / "v1"
LLAMA = ("spelling", "far", "near")  # tasks whose model and data are in the package

pytestmark = pytest.mark.xdist_group("leaderboard-1")


@pytest.fixture(scope="module")
def board() -> Iterator[SimpleNamespace]:
    """The modules that make the page."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import leaderboard_page
    import leaderboard_result
    import leaderboard_run

    yield SimpleNamespace(page=leaderboard_page, result=leaderboard_result, run=leaderboard_run)
    patch.undo()


@pytest.fixture(scope="module")
def one(board: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> list[ModuleType]:
    """The tasks, of which one is trained: a small study that is archived elsewhere, and someone else's beside it."""
    folder = tmp_path_factory.mktemp("board")
    for file in FOLDER.glob("*.yaml"):
        shutil.copy(file, folder)
    shutil.copy(RESULTS / "priced" / "study.yaml", folder / "spelling.yaml")
    shutil.copy(RESULTS / "priced.parquet", folder / "spelling.parquet")
    base = (ROOT / "recipes" / "start" / "quickstart-dense.yaml").read_text(encoding="utf-8")
    (folder / "quickstart-dense.yaml").write_text(base, encoding="utf-8")
    text = (RESULTS / "priced" / "base.yaml").read_text(encoding="utf-8")
    (folder / "base.yaml").write_text(text.replace("../../../recipes/start/", ""), encoding="utf-8")
    worth = {"lossless": {key: {"value": 0.25} for key in ("price", "noise", "bias", "product")}}
    worth["lossless"] |= {"noise_curved": None, "product_curved": None, "verdict": "could"}  # type: ignore[dict-item]
    (folder / "spelling-worth.json").write_text(json.dumps(worth), encoding="utf-8")
    found: list[ModuleType] = board.result.read_results(folder)
    return found


@pytest.mark.long
def test_page_and_data_come_again_from_the_values(board: SimpleNamespace) -> None:
    results = [one for one in board.result.read_results() if one.is_trained]
    assert board.page.write_data(results) == (RESULTS / "leaderboard.csv").read_text(encoding="utf-8")
    assert board.page.render(results) == (RESULTS / "leaderboard.html").read_text(encoding="utf-8")


def test_the_page_has_trained_tasks_and_says_first_what_they_cannot_show() -> None:
    page = (RESULTS / "leaderboard.html").read_text(encoding="utf-8")
    trained = [task for task in load_board().rules.tasks if (FOLDER / f"{task}.parquet").exists()]
    assert re.findall(r'<section><h2 id="([^"]+)">', page) == trained == ["spelling"]
    first = re.sub(r"<[^>]+>", "", page.split("</h1>")[1]).strip()
    assert first.startswith("A task with batches of one example cannot show what a backward policy saves: spelling is")
    assert not re.search(r'(?:src|href)="(?!#|leaderboard/v0\.html")', page)
    assert {*re.findall(r'href="#([^"]+)"', page)} <= {*re.findall(r'id="([^"]+)"', page)}


@pytest.mark.slow
def test_a_page_of_one_task_says_what_its_comparison_says(board: SimpleNamespace, one: list[SimpleNamespace]) -> None:
    spelling, *others = one
    assert spelling.is_trained
    assert not any(task.is_trained for task in others)
    (method,) = (row for row in spelling.rows if not row.is_control)
    (best,) = (row for row in spelling.rows if row.is_best)
    priced = board.result.find_archive(RESULTS / "priced")
    found = board.result.compare(priced, {"study": "priced"}, "--baseline", "dense")
    group = next(group for group in found["groups"] if group["label"] == "lossless")
    assert (best.arm, method.arm, method.outcome) == ("dense", "lossless", group["statements"][0]["outcome"])
    assert (method.difference, method.low) == tuple(
        group["quality"]["difference"][key] for key in ("mean", "family_low")
    )
    page = board.page.render([spelling])
    matrix, _, rest = page.partition("</table>")
    assert f'<a href="#spelling-lossless">{method.outcome}</a><br>{method.difference:+.3f}' in matrix
    assert "<svg" in rest
    assert f"spelling, beside dense: lower: {'lossless' if method.outcome == 'lower' else 'none'}" in page
    assert {*re.findall(r'href="#([^"]+)"', page)} <= {*re.findall(r'id="([^"]+)"', page)}
    rows = [*csv.DictReader(board.page.write_data(one).splitlines())]
    assert sorted(row["run"] for row in rows) == sorted(
        run for row in spelling.rows for run in (one["run_id"] for one in row.runs)
    )
    assert {row["control"] for row in rows if row["arm"] == "dense"} == {"yes"}


def test_others_with_a_name_of_ours_have_rows_of_their_own(board: SimpleNamespace, one: list[SimpleNamespace]) -> None:
    spelling, *rest = one
    ours = spelling.find("lossless")
    theirs = replace(
        ours, others="A. Author", cites="https://example.org", outcome="higher", difference=9.0, best="plain"
    )
    results = [replace(spelling, rows=(*spelling.rows, theirs)), *rest]
    assert (results[0].find("lossless"), results[0].find("lossless", "A. Author")) == (ours, theirs)
    page = board.page.render(results[:1])
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len({*ids})
    assert "lossless (A. Author), beside plain: higher." in page
    rows = [*csv.DictReader(board.page.write_data(results).splitlines())]
    assert {row["others"] for row in rows if row["arm"] == "lossless"} == {"", "A. Author"}


@pytest.mark.slow
def test_a_page_is_not_made_of_an_archive_from_which_other_choices_follow(
    board: SimpleNamespace, one: list[SimpleNamespace], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")
    for file in (tmp_path_factory.getbasetemp() / "board0").iterdir():
        shutil.copy(file, folder)
    study = (folder / "spelling.yaml").read_text(encoding="utf-8")
    (folder / "spelling.yaml").write_text(study.replace("report: 3-5", "report: 3-6"), encoding="utf-8")
    with pytest.raises(SystemExit, match="the study needs this trial"):
        board.result.read_result(folder, "spelling")


@pytest.mark.parametrize("task", LLAMA)
def test_the_studies_of_our_own_keep_the_rules(task: str) -> None:
    rules = load_board(FOLDER)
    own = own_task(rules, task)
    loaded = load_study(own.study)
    found = [*check_study(loaded, loaded, own, rules)]
    assert {one.level for one in found} == {"ok"}, found
    assert len(loaded.study.seeds.tune) == rules.rules.seeds.tune
    assert len(loaded.study.seeds.report) == rules.rules.seeds.report
    assert "training.per_device_train_batch_size" in loaded.study.vary


def test_every_task_is_a_study_with_the_same_terms(board: SimpleNamespace) -> None:
    rules = load_board(FOLDER).rules
    files = {file.stem for file in FOLDER.glob("*.yaml") if not file.stem.endswith("-base")}
    assert {*rules.tasks} == {*board.run.find_tasks()} == files - {"rules"}
    assert set(board.run.CONTROLS) == set(rules.controls)
    studies = [board.run.Task(name).study for name in rules.tasks]
    for key in ("search", "budget", "seeds"):
        assert all(study[key] == studies[0][key] for study in studies), key
    for study in studies:
        assert study["shares"] == {"dense-fused": "dense"}
        assert [*study["vary"]] == ["training.learning_rate", "training.per_device_train_batch_size"]


def test_the_log_has_what_was_wrong_with_version_0() -> None:
    log = Path(ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert "Review of the leaderboard's version 0" in log


def test_the_page_says_what_studies_of_unequal_noise_state() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "tuning-unequal.json").read_text(encoding="utf-8"))
    false, power = (max(row[key] for row in record["rows"]) for key in ("false", "power_4"))
    text = " ".join((RESULTS / "standings.md").read_text(encoding="utf-8").split())
    assert f"In {record['studies']:,} simulated studies of equal methods" in text
    assert f"at most {false:.1%} state a difference".replace("%", " %") in text
    assert f"Power is low: {power:.2f} or less for four standard deviations" in text
