"""``sparsebp judge`` as a user calls it."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sparsebp_cli.cli.app import main
from sparsebp_cli.run import State, list_runs, read
from sparsebp_lab.judge.ledger import Ledger

from .conftest import Cli, Start
from .here import HereDriver, write_recipe

WORDS = ("judge", "--against", "base.yaml")
BETTER = (*WORDS, "--set", "training.learning_rate=0.5", "--budget", "1e15", "--worst", "0.6")
WORSE = (*WORDS, "--set", "training.learning_rate=1.5", "--budget", "1h")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a judge in this process train in this process."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparsebp_lab.judge.recipe_arms.Driver", HereDriver)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sparsebp", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_people_and_programs_get_the_same_answer(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *BETTER) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("base training.learning_rate=0.5 against base, eval/loss: better (evidence ")
    assert "gain on fresh seeds: +0." in shown
    assert "better in the mean, if no seed loses more than 0.6: shown" in shown
    assert call(monkeypatch, *BETTER, "-o", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["outcome"], told["exit_code"], told["answered"]) == (1, "better", 0, True)
    assert told["evidence"] >= told["needed"] == pytest.approx(1 / told["level"])
    assert told["ledger"]["kept"] == told["ledger"]["asked"] == 1
    assert [look["number"] for look in told["looks"]["pairs"]] == [*range(1, len(told["looks"]["pairs"]) + 1)]
    assert call(monkeypatch, *WORDS, "--set", "training.learning_rate=0.5", "--final", "-o", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["test"]["pairs"] == 6
    assert told["test"]["low"] > 0.0


def test_a_candidate_is_a_recipe_a_policy_or_a_change(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All four are one question: it is known by what it trains."""
    text = (tmp_path / "base.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text + "policy: [{name: topk, keep: 0.25}]\n")
    words = ("--against", "base.yaml", "--budget", "1e15", "-o", "json")
    given = (
        ["mine.yaml"],
        ["topk", "--set", "policy.0.keep=0.25"],
        ["--set", "policy=topk", "--set", "policy.0.keep=0.25"],
    )
    told = []
    for candidate in given:
        call(monkeypatch, "judge", *candidate, *words)
        told.append(json.loads(capsys.readouterr().out))
    assert len({one["question"] for one in told}) == 1
    assert told[-1]["ledger"]["asked"] == 1
    assert [one["candidate"]["name"] for one in told] == ["mine.yaml"] * 3  # as it was first asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*WORDS, "--budget", "1h"), "judge needs a candidate"),
        ((*WORDS, "--set", "training.weight_decay=0.1"), "give either --budget, or --final"),
        ((*BETTER, "--final"), "give either --budget, or --final"),
        ((*WORDS, "--set", "training.weight_decay=0.1", "--budget", "soon"), "--budget must be a time"),
        ((*WORDS, "--set", "training.weight_decay=0.1", "--final"), "run judge without --final first"),
        ((*BETTER, "--effect", "-1"), "--effect must be a number above 0"),
        ((*BETTER, "--margin", "eval/accuracy=1"), "must name eval/loss, the metric that decides, got eval/accuracy"),
        ((*WORDS, "--set", "name=new", "--budget", "1h"), "are identical"),
        (("judge", "nosuch", *WORDS[1:], "--budget", "1h"), "no file 'nosuch'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert call(monkeypatch, *words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.count("\n") == 0
    assert not Ledger().file.exists()


@pytest.mark.slow
def test_two_judges_on_one_ledger_one_of_them_killed(cli: Cli, start: Start, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    moment = random.Random(4)
    other = start(*WORSE)
    for _ in range(2):
        judge = start(*BETTER)
        time.sleep(moment.uniform(4.0, 12.0))
        judge.kill()
        judge.communicate()
    other.communicate()
    assert other.returncode == 11
    done = cli(*BETTER)
    assert done.returncode == 0, done.stderr
    book = Ledger().read()
    assert Counter(one.outcome for one in book.questions.values()) == {"better": 1, "not shown": 1}
    for one in book.questions.values():
        for looks in one.looks.values():
            assert [look.number for look in looks] == [*range(1, len(looks) + 1)]
    finishes = [
        sum(r["kind"] == "end" and r["status"] == State.FINISHED for r, _ in read(run.path)) for run in list_runs()
    ]
    assert set(finishes) == {1}
    assert sum(one.spent["runs"] for one in book.questions.values()) == len(finishes)
