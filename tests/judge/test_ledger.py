"""The ledger keeps every line once, whoever writes it and whenever a writer is killed."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunBusyError, UsageError
from sparsebp_lab.judge.ledger import Ledger
from sparsebp_lab.judge.level import find_level


def ask(ledger: Ledger, question: str, baseline: str = "base") -> None:
    sides = {"baseline": {"name": "b", "digest": baseline}, "candidate": {"name": "c", "digest": question}}
    ledger.write({"kind": "asked", "question": question, "metric": "eval/loss", "effect": None, "margin": None} | sides)


def look(ledger: Ledger, question: str, stage: str, number: int, gain: float = 1.0) -> None:
    values = {"gain": gain, "runs": [f"b{number}", f"{question}{number}"], "values": [2.0 + number, 1.0]}
    cost = {run: {"flops": 5.0, "seconds": 2.0} for run in values["runs"]}  # type: ignore[attr-defined]
    ledger.write({"kind": "look", "question": question, "stage": stage, "number": number, "charged": cost} | values)


def stake(ledger: Ledger, question: str) -> int:
    place = (
        ledger.write({"kind": "staked", "question": question, "design": 1.0, "worst": 1.0}).questions[question].place
    )
    assert place is not None
    return place


def answer(ledger: Ledger, question: str, outcome: str) -> None:
    ledger.write({"kind": "answered", "question": question, "outcome": outcome, "reason": ""})


def test_an_entry_is_written_once(home_folder: Path) -> None:
    ledger = Ledger()
    for _ in range(3):
        ask(ledger, "q")
        look(ledger, "q", "screen", 1)
        assert stake(ledger, "q") == 1
    look(ledger, "q", "screen", 2)
    look(ledger, "q", "pairs", 1)
    assert len(ledger.file.read_text().splitlines()) == 6
    assert [len(some) for some in ledger.read().questions["q"].looks.values()] == [2, 1]


def test_a_run_of_the_baseline_is_paid_once(home_folder: Path) -> None:
    ledger = Ledger()
    for question in ("one", "two"):
        ask(ledger, question)
        look(ledger, question, "screen", 1)
    book = ledger.read()
    assert [one.spent for one in book.questions.values()] == [
        {"flops": 10.0, "seconds": 4.0, "runs": 2},
        {"flops": 5.0, "seconds": 2.0, "runs": 1},
    ]
    assert book.find_values("base") == [3.0]
    assert book.find_values("another") == []


def test_only_a_candidate_that_is_kept_gives_its_place_back(home_folder: Path) -> None:
    ledger = Ledger()
    for question in "abcd":
        ask(ledger, question)
    assert [stake(ledger, question) for question in "abc"] == [1, 2, 3]  # all three at once
    answer(ledger, "b", "better")
    answer(ledger, "a", "not shown")
    assert stake(ledger, "d") == 2
    book = ledger.read()
    assert book.taken == {1, 2, 3}
    open_or_lost = [one.place for one in book.questions.values() if one.outcome != "better" and one.place]
    assert sum(map(find_level, open_or_lost)) < 0.05
    assert book.num_kept == 1


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_line_without_its_end_is_as_if_never_written(home_folder: Path, cut: int) -> None:
    ledger = Ledger()
    ask(ledger, "q")
    look(ledger, "q", "screen", 1)
    whole = ledger.file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    ledger.file.write_bytes(whole[: -len(last)] + last[:cut])
    ledger = Ledger()  # the writer was killed
    assert "screen" not in ledger.read().questions["q"].looks
    look(ledger, "q", "screen", 1)
    look(ledger, "q", "screen", 2)
    assert [one.number for one in ledger.read().questions["q"].looks["screen"]] == [1, 2]


@pytest.mark.parametrize("damage", ["change", "remove", "swap", "garble"])
def test_a_ledger_that_was_changed_is_refused(home_folder: Path, damage: str) -> None:
    ledger = Ledger()
    ask(ledger, "q")
    look(ledger, "q", "screen", 1)
    look(ledger, "q", "screen", 2)
    lines = ledger.file.read_text().splitlines(keepends=True)
    changed = {
        "change": [*lines[:2], lines[2].replace('"gain": 1.0', '"gain": 9.0'), lines[3]],
        "remove": [lines[0], lines[1], lines[3]],
        "swap": [lines[0], lines[1], lines[3], lines[2]],
        "garble": [lines[0], "{}\n", *lines[2:]],
    }[damage]
    ledger.file.write_text("".join(changed))
    with pytest.raises(UsageError, match=r"ledger\.jsonl:\d: the ledger was changed"):
        ledger.read()


def test_seeds_follow_from_the_ledger_and_from_nothing_that_is_known_before(home_folder: Path, tmp_path: Path) -> None:
    first, second = Ledger(tmp_path / "one"), Ledger(tmp_path / "two")
    ask(first, "q")
    ask(second, "q")
    keys = [("pairs", "q", number) for number in range(50)]
    seeds, others = ([ledger.read().find_seed(*key) for key in keys] for ledger in (first, second))
    assert seeds == [first.read().find_seed(*key) for key in keys]
    assert len({*seeds, *others}) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_question_has_one_judge_at_a_time(home_folder: Path) -> None:
    ledger = Ledger()
    with ledger.hold("q"):
        with pytest.raises(RunBusyError, match="another judge command is working on this question"), Ledger().hold("q"):
            pass
        with Ledger().hold("other"):
            pass
    with Ledger().hold("q"):
        pass


def _write_many(place: Path, name: str) -> None:
    ledger = Ledger(place)
    for number in range(12):
        ask(ledger, f"shared{number}")
        look(ledger, f"shared{number}", "screen", 1)
        ask(ledger, f"{name}{number}")
        stake(ledger, f"{name}{number}")


def test_two_judges_on_one_ledger_write_whole_lines_and_take_different_places(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    judges = [context.Process(target=_write_many, args=(tmp_path, name)) for name in ("a", "b")]
    for one in judges:
        one.start()
    for one in judges:
        one.join()
        assert one.exitcode == 0
    book = Ledger(tmp_path).read()
    assert sorted(book.taken) == list(range(1, 25))
    assert len(book.questions) == 36
    assert all(len(book.questions[f"shared{number}"].looks["screen"]) == 1 for number in range(12))
    kinds = [json.loads(line)["entry"]["kind"] for line in Ledger(tmp_path).file.read_text().splitlines()]
    assert kinds.count("ledger") == 1
