"""Answers and runs hold how far the ledger went, so that a ledger which lost its last lines is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from sparsebp_cli.cli.app import main
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import home, list_runs
from sparsebp_lab.judge.answer import JudgeAnswer
from sparsebp_lab.judge.ledger import Ledger
from sparsebp_lab.judge.session import JudgeSession

from .here import make_session, write_recipe
from .script_material import COMMAND, METRIC, FileRun, make_repository
from .test_ledger import ask, stake

BETTER, WORSE = "training.learning_rate=0.7", "training.learning_rate=1.5"
CUTS = {
    "the last line": lambda lines: lines[:-1],
    "the last five lines": lambda lines: lines[:-5],
    "the end of the last line": lambda lines: [*lines[:-1], lines[-1][:-1]],
    "all but the first line": lambda lines: lines[:1],
    "all lines": lambda lines: [],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def answer(session: JudgeSession) -> JudgeAnswer:
    question = session.run()
    return JudgeAnswer(session.proposal, question, session.book, session.ledger, session.terms)


def cut(ledger: Ledger, how: str) -> None:
    ledger.file.write_bytes(b"".join(CUTS[how](ledger.file.read_bytes().splitlines(keepends=True))))


def read_error() -> str:
    with pytest.raises(UsageError) as caught:
        Ledger().read()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_answer_and_each_run_of_it_hold_how_far_the_ledger_went(file: Path) -> None:
    found = answer(make_session(file, WORSE))
    lines = [json.loads(line) for line in found.ledger.file.read_text().splitlines()]
    told = found.to_facts()["ledger"]
    assert isinstance(told, dict)
    assert (told["asked"], told["lines"], told["digest"]) == (1, len(lines), lines[-1]["digest"])
    assert f"the ledger has {len(lines)} lines, and ends with digest {lines[-1]['digest']}" in found.lines()
    marks = [json.loads(run.plan_file.read_text())["provenance"]["ledger"] for run in list_runs()]
    assert len(marks) == found.question.spent["runs"] == 6
    assert all(lines[mark["lines"] - 1]["digest"] == mark["digest"] for mark in marks)
    assert all(mark["questions"] == 1 for mark in marks)


@pytest.mark.parametrize("how", CUTS)
def test_a_ledger_that_is_shorter_than_an_answer_is_refused(file: Path, how: str) -> None:
    found = answer(make_session(file, WORSE))
    found.save()
    assert Ledger().read().mark == found.book.mark
    cut(found.ledger, how)
    kept = home() / "judge" / "answers" / f"{found.question.digest}.json"
    assert f"but {kept} recorded {found.book.mark.lines} lines, 1 questions" in read_error()
    with pytest.raises(UsageError, match=r"recorded \d+ lines"):
        make_session(file, BETTER).run()


@pytest.mark.parametrize("how", ["the last five lines", "all but the first line", "all lines"])
def test_a_ledger_that_is_shorter_than_the_plan_of_a_run_is_refused(file: Path, how: str) -> None:
    found = answer(make_session(file, WORSE))
    cut(found.ledger, how)
    assert re.search(r"but \S+/runs/\S+/plan\.json recorded \d+ lines", read_error())


def test_a_ledger_that_goes_on_otherwise_after_its_end_was_cut_is_refused(file: Path, tmp_path: Path) -> None:
    found = answer(make_session(file, WORSE))
    found.save()
    cut(found.ledger, "the last five lines")
    elsewhere = Ledger(tmp_path / "elsewhere")  # where nothing rests on it
    elsewhere.folder.mkdir(parents=True)
    elsewhere.file.write_bytes(found.ledger.file.read_bytes())
    for number in range(9):
        ask(elsewhere, f"another{number}")
    found.ledger.file.write_bytes(elsewhere.file.read_bytes())
    assert f"has a different line {found.book.mark.lines}, but" in read_error()


def test_a_ledger_that_is_missing_while_its_answers_and_runs_are_there_is_refused(file: Path) -> None:
    found = answer(make_session(file, WORSE))
    found.ledger.file.unlink()
    assert "is missing, but" in read_error()
    with pytest.raises(UsageError, match="is missing, but"):
        make_session(file, BETTER).run()
    assert not found.ledger.file.exists()  # no new one has begun


def test_a_ledger_that_lost_a_question_while_a_judge_works_is_refused(home_folder: Path) -> None:
    ledger = Ledger()
    ask(ledger, "kept")
    before = ledger.file.read_bytes()
    ask(ledger, "lost")
    assert stake(ledger, "lost") == 1
    ledger.file.write_bytes(before)
    with pytest.raises(UsageError, match=r"has 2 lines, but this command recorded 4 lines, 2 questions"):
        ask(ledger, "next")


def test_an_answer_that_cannot_be_read_is_refused(file: Path) -> None:
    found = answer(make_session(file, WORSE))
    found.save()
    kept = home() / "judge" / "answers" / f"{found.question.digest}.json"
    kept.write_text(kept.read_text()[:40])
    assert f"{kept}: the answer was changed or damaged" in read_error()


def test_runs_and_ledgers_of_earlier_versions_without_a_mark_are_read(file: Path) -> None:
    found = answer(make_session(file, WORSE))
    for run in list_runs():
        plan = json.loads(run.plan_file.read_text())
        del plan["provenance"]["ledger"]
        run.plan_file.write_text(json.dumps(plan))
    assert Ledger().read().mark == found.book.mark
    assert answer(make_session(file, WORSE)).outcome == "not shown"


def test_a_script_that_was_judged_holds_how_far_the_ledger_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_repository(tmp_path / "mine", base={}, better={"gain": 0.3}))
    monkeypatch.setattr("sparsebp_lab.judge.script_arms.ScriptRun", FileRun)
    monkeypatch.setattr("sparsebp_lab.verb.judge.POLL_SECONDS", 0.02)
    words = ("better", "--against", "base", "--script", COMMAND, "--metric", METRIC, "--budget", "1h")
    monkeypatch.setattr(sys, "argv", ["sparsebp", "judge", *words])

    def call() -> int:
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    assert call() == 0
    (kept,) = (home() / "judge" / "answers").iterdir()
    kept.unlink()
    ledger = Ledger()
    cut(ledger, "the last five lines")
    capsys.readouterr()
    assert call() == 2
    assert re.search(r"but \S+/process\.json recorded \d+ lines", " ".join(capsys.readouterr().err.split()))
