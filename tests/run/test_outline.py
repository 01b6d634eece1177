"""A list of runs reads an outline beside each journal, and what it says is what the journal says."""

from __future__ import annotations

import json
import math
import os

import pytest

from sparsebp_cli.cli.runs import describe_run
from sparsebp_cli.run import History, JournalWriter, RunFolder, State, find_run, list_runs
from sparsebp_cli.run import journal as journal_module
from sparsebp_cli.run.journal import OUTLINE, find_outline
from tests.compare.conftest import MakeRun, make_run

__all__ = ["make_run"]


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a journal that is read fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("the journal was read")

    monkeypatch.setattr(journal_module, "parse_record", refuse)


def test_a_run_that_ended_is_listed_without_reading_its_journal(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(loss=3.0)
    history = History.load(run.path)
    forbid_reading(monkeypatch)
    found = describe_run(run)
    assert (found.state, found.step, found.eval_loss) == ("finished", 20, history.last("eval/loss"))
    assert run.state() is State.FINISHED
    assert run.ended() is State.FINISHED


def test_an_older_run_gets_its_outline_from_its_first_reader(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run.path / OUTLINE).unlink()
    before = describe_run(run)
    forbid_reading(monkeypatch)
    assert describe_run(run) == before


def test_a_run_that_goes_on_is_read_anew(make_run: MakeRun) -> None:
    run = make_run(end="interrupted", steps=10)
    assert describe_run(run).step == 10
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=10, environment={})
        assert find_outline(run.path).end is None
        journal.write("metrics", step=12, values={"eval/loss": 2.0})
        assert (describe_run(run).step, describe_run(run).eval_loss) == (12, 2.0)
        journal.write("end", status="finished", step=12, text="")
    assert run.state() is State.FINISHED
    assert find_outline(run.path).attempts == 2


def test_the_first_value_of_a_repeated_step_is_the_one_listed(make_run: MakeRun) -> None:
    run = make_run()
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=10, environment={})
        journal.write("metrics", step=20, values={"eval/loss": 9.0})
        journal.write("end", status="finished", step=20, text="")
    assert describe_run(run).eval_loss == History.load(run.path).last("eval/loss") == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_comes_back(make_run: MakeRun, value: float) -> None:
    run = make_run(metrics={"eval/loss": value})
    assert repr(describe_run(run).eval_loss) == repr(value)
    assert repr(describe_run(run).eval_loss) == repr(value)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b"{}", b'{"version": 1}', b"[" * 50_000, {"step": -1}, {"end": "exploded"}, {"x": 1}],
)
def test_an_odd_outline_is_not_believed(make_run: MakeRun, content: bytes | dict[str, object]) -> None:
    run = make_run()
    before = describe_run(run)
    if isinstance(content, dict):
        content = json.dumps(json.loads((run.path / OUTLINE).read_bytes()) | content).encode()
    (run.path / OUTLINE).write_bytes(content)
    assert describe_run(run) == before


def test_an_outline_of_another_journal_is_not_believed(make_run: MakeRun) -> None:
    run, other = make_run(loss=3.0), make_run(loss=4.0, seed=1)
    (run.path / OUTLINE).write_bytes((other.path / OUTLINE).read_bytes())
    assert describe_run(run).eval_loss == 3.0
    journal = run.path / "journal.jsonl"
    text, found = journal.read_bytes(), journal.stat()
    journal.write_bytes(text.replace(b'"eval/loss": 3.0', b'"eval/loss": 2.0'))
    os.utime(journal, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert describe_run(run).eval_loss == 2.0


def test_a_folder_that_cannot_be_written_is_listed_all_the_same(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run.path / OUTLINE).unlink()
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("read-only")))
    assert describe_run(run).state == "finished"
    assert not (run.path / OUTLINE).exists()


def test_a_list_reads_every_plan_once_and_an_id_reads_none(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run("one", seed) for seed in range(4)]
    read: list[str] = []
    brief = RunFolder.brief
    monkeypatch.setattr(RunFolder, "brief", lambda run: (read.append(run.run_id), brief(run))[1])
    assert [run.run_id for run in list_runs()] == [run.run_id for run in reversed(runs)]
    assert sorted(read) == sorted(run.run_id for run in runs)
    read.clear()
    assert find_run(runs[2].run_id) == [runs[2]]
    assert read == []
    assert find_run("one") == runs
    assert len(read) == 4
