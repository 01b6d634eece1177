"""The journal is the truth: nothing whole is lost, nothing counts twice."""

from __future__ import annotations

import math
import resource
import threading
import time

import pytest

from sparsebp_cli.errors import RunBusyError, RunNotFoundError
from sparsebp_cli.run import History, JournalWriter, RunFolder, State, create_run, find_run, list_runs, read
from sparsebp_cli.run.journal import find_outline


def write_plan(run: RunFolder, name: str, created: float) -> None:
    run.plan_file.write_text(f'{{"recipe": {{"name": "{name}"}}, "created": {created}}}')


def test_a_half_written_line_is_cut_off_by_the_next_attempt(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        journal.write("metrics", step=1, values={"a": 1.0})
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind": "metrics", "attempt": 1, "st')
    assert len(list(read(tmp_path))) == 1
    with JournalWriter(tmp_path) as journal:
        assert journal.attempt == 2
        journal.write("metrics", step=2, values={"a": 2.0})
    assert History.load(tmp_path).series("a") == {1: 1.0, 2: 2.0}


def test_the_first_value_of_a_repeated_step_counts(tmp_path) -> None:
    for value in (1.0, 2.0):
        with JournalWriter(tmp_path) as journal:
            journal.write("metrics", step=1, values={"a": value})
    assert History.load(tmp_path).series("a") == {1: 1.0}


def test_values_that_are_not_finite_come_back(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        journal.write("metrics", step=1, values={"a": math.inf, "b": -math.inf, "c": math.nan})
        journal.write("facts", values={"names": ["nan"], "text": "x"})
    history = History.load(tmp_path)
    assert history.last("a") == math.inf
    assert history.last("b") == -math.inf
    assert math.isnan(history.last("c"))
    assert history.facts == {"names": ["nan"], "text": "x"}


def test_reading_goes_on_from_an_offset(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        for step in range(5):
            journal.write("metrics", step=step, values={"a": float(step)})
    offsets = [offset for _, offset in read(tmp_path)]
    assert [record["step"] for record, _ in read(tmp_path, offsets[2])] == [3, 4]


def test_a_damaged_line_loses_itself_only(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        for step in range(3):
            journal.write("metrics", step=step, values={"a": float(step)})
    file = tmp_path / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0garbage\n" + lines[2])
    assert History.load(tmp_path).series("a") == {0: 0.0, 2: 2.0}


@pytest.mark.parametrize("odd", [b"[]", b"{}", b"\xff\xfe\0"])
def test_an_odd_line_stays_where_it_is_when_the_run_goes_on(odd: bytes) -> None:
    run = create_run("abc123def456")
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={})
        journal.write("metrics", step=1, values={"a": 1.0})
    with (run.path / "journal.jsonl").open("ab") as file:
        file.write(odd + b"\n")
    with JournalWriter(run.path) as journal:
        assert journal.attempt == 2
        journal.write("metrics", step=2, values={"a": 2.0})
        journal.write("end", status="finished", step=2, text="")
    assert History.load(run.path).series("a") == {1: 1.0, 2: 2.0}
    assert run.state() is State.FINISHED
    assert len(History.load(run.path).unreadable) == 1
    assert odd in (run.path / "journal.jsonl").read_bytes()


def test_a_full_disk_leaves_no_half_record_for_the_next_one_to_go_on_from(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        journal.write("metrics", step=1, values={"a": 1.0})
        size, limits = journal.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # room for a part of a record
        try:
            with pytest.raises(OSError, match="too large"):
                journal.write("metrics", step=2, values={"a": 2.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert journal.path.stat().st_size == size
        journal.write("metrics", step=3, values={"a": 3.0})
    assert History.load(tmp_path).series("a") == {1: 1.0, 3: 3.0}


def test_the_clock_going_back_changes_no_order(tmp_path, monkeypatch) -> None:
    with JournalWriter(tmp_path) as journal:
        for step, now in ((1, 2000.0), (2, 1000.0), (3, 3000.0)):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            journal.write("metrics", step=step, values={"a": float(step)})
    assert list(History.load(tmp_path).series("a")) == [1, 2, 3]
    assert History.load(tmp_path).last("a") == 3.0


def test_the_state_follows_locks_and_journal() -> None:
    run = create_run("abc123def456")
    assert run.state() is State.QUEUED
    lock = run.lock("worker")
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={})
        assert run.state() is State.RUNNING
        lock.release()
        assert run.state() is State.INTERRUPTED
        journal.write("end", status="failed", step=1, text="x")
        assert run.state() is State.FAILED
        journal.write("attempt", from_step=0, environment={})
        assert run.state() is State.INTERRUPTED
        journal.write("end", status="finished", step=2, text="")
    assert run.state() is State.FINISHED


def test_a_lock_is_one_persons_at_a_time() -> None:
    run = create_run("abc123def456")
    lock = run.lock("worker")
    problems = []

    def try_it() -> None:
        with pytest.raises(RunBusyError) as caught:
            run.lock("worker")
        problems.append(str(caught.value))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert "abc123def456" in problems[0]
    lock.release()
    run.lock("worker").release()


def test_runs_answer_to_id_prefix_name_and_age() -> None:
    for number, (run_id, name) in enumerate([("aaa111", "one"), ("aab222", "two"), ("bbb333", "two")]):
        write_plan(create_run(run_id), name, float(number))
    assert [run.run_id for run in list_runs()] == ["bbb333", "aab222", "aaa111"]
    ids = {word: [run.run_id for run in find_run(word)] for word in ("aaa111", "aab", "@last", "@2", "two", "one")}
    assert ids == {
        "aaa111": ["aaa111"],
        "aab": ["aab222"],
        "@last": ["bbb333"],
        "@2": ["aab222", "bbb333"],
        "two": ["aab222", "bbb333"],
        "one": ["aaa111"],
    }


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("aa", "no run matches"),
        ("@4", "there are 3 runs"),
        ("@x", "@N"),
        ("onne", "did you mean one"),
        ("aac", "no run"),
    ],
)
def test_a_name_that_no_run_answers_to_is_one_helpful_line(word, says) -> None:
    for number, (run_id, name) in enumerate([("aaa111", "one"), ("aab222", "two"), ("bbb333", "two")]):
        write_plan(create_run(run_id), name, float(number))
    with pytest.raises(RunNotFoundError, match=says):
        find_run(word)


def test_a_prefix_of_two_runs_names_both() -> None:
    for run_id in ("aaa111", "aaa222"):
        write_plan(create_run(run_id), "x", 0.0)
    with pytest.raises(RunNotFoundError, match="matches several runs: aaa222, aaa111"):
        find_run("aaa")


def test_layers_and_examples_come_back_by_step_and_the_first_word_counts(tmp_path) -> None:
    with JournalWriter(tmp_path) as journal:
        journal.write("layers", step=4, values={"a": {"kept_share": 0.5, "cosine": math.nan}, "b": {"cosine": None}})
        journal.write("examples", step=9, values={"loss": [1.5, math.inf], "targets": [15, 3]})
        journal.write("layers", step=4, values={"a": {"kept_share": 0.9}})
    history = History.load(tmp_path)
    assert history.layers[4]["a"]["kept_share"] == 0.5
    assert math.isnan(history.layers[4]["a"]["cosine"])
    assert history.layers[4]["b"] == {"cosine": None}
    assert history.examples == {9: {"loss": [1.5, None], "targets": [15, 3]}}


def test_values_after_the_checkpoint_of_an_allowed_change_replace_earlier_ones(tmp_path) -> None:
    change = {"field": "training.learning_rate", "then": "0.1", "now": "0.2"}
    for attempt, start in enumerate((1, 3)):
        with JournalWriter(tmp_path) as journal:
            if attempt:
                journal.write("facts", values={"changes": [{**change, "step": 2}]})
            for step in range(start, 6 - attempt):
                journal.write("metrics", step=step, values={"a": step + attempt / 10, "eval/loss": step + attempt / 10})
                journal.write("scores", step=step, values={"accuracy": [attempt / 1]})
    found = History.load(tmp_path)
    assert found.series("a") == {1: 1.0, 2: 2.0, 3: 3.1, 4: 4.1}  # nothing of step 5, which no model of the run reached
    assert {step: values["accuracy"][0] for step, values in found.scores.items()} == {1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0}
    outline = find_outline(tmp_path)
    assert (outline.step, outline.eval_loss) == (4, 4.1)


def test_a_change_without_a_checkpoint_replaces_the_evaluation_before_the_first_step(tmp_path) -> None:
    for attempt in range(2):
        with JournalWriter(tmp_path) as journal:
            if attempt:
                journal.write("facts", values={"changes": [{"field": "data", "then": "a", "now": "b", "step": 0}]})
            journal.write("metrics", step=0, values={"a": float(attempt)})
    assert History.load(tmp_path).series("a") == {0: 1.0}
