"""A line of a journal that holds no record costs itself and one line of output, in every verb that reads runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsebp_cli.cli.runs import describe_run, runs
from sparsebp_cli.compare import compare_runs, load_all, local_candidates, table
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from tests.compare.conftest import MakeRun, make_run

pytestmark = pytest.mark.promise("R22")

__all__ = ["make_run"]

HEAD = {"attempt": 1, "time": 1.0}


def as_line(**fields: Any) -> bytes:
    return json.dumps(HEAD | fields).encode()


ODD = {
    "a list": b"[]",
    "a number": b"5",
    "an empty object": b"{}",
    "an unknown status": as_line(kind="end", status="exploded", step=3, text=""),
    "no environment": as_line(kind="attempt", from_step=0),
    "half a line": b'{"kind": "metrics", "attempt": 1, "ti',
    "binary": b"\x00\xff\xfe\x80\x01",
    "values that are a list": as_line(kind="metrics", step=3, values=[1, 2]),
    "a metric that is text": as_line(kind="metrics", step=3, values={"eval/loss": "low"}),
    "a step that is text": as_line(kind="metrics", step="three", values={"eval/loss": 1.0}),
    "an integer that no float holds": b'{"kind":"metrics","attempt":1,"time":1,"step":3,"values":{"a":1'
    + b"0" * 400
    + b"}}",
    "half a surrogate pair": b'{"kind":"note","attempt":1,"time":1,"level":"warning","text":"\\ud800"}',
    "brackets without end": b"[" * 50_000,
    "policies that are a number": as_line(kind="facts", values={"policies": 5}),
    "packages that are text": as_line(kind="attempt", from_step=0, environment={"packages": "torch"}),
    "layers without figures": as_line(kind="layers", step=3, values={"a": 0.5}),
}


def damage(run: RunFolder, line: bytes, place: int = 5) -> None:
    """Put a line into the middle of a run's journal."""
    file = run.path / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:place], line + b"\n", *lines[place:]]))


@pytest.mark.parametrize("line", ODD.values(), ids=list(ODD))
def test_an_odd_line_costs_one_line_of_output_and_nothing_else(make_run: MakeRun, line: bytes) -> None:
    make_run("good")
    bad = make_run("bad", 1)
    whole = History.load(bad.path)
    damage(bad, line)
    found = describe_run(bad)
    assert (found.state, found.eval_loss, found.step) == ("finished", whole.last("eval/loss"), 20)
    assert found.problem == "line 6 of its event log cannot be read and is left out"
    assert bad.state() is State.FINISHED
    comparison = compare_runs(load_all(local_candidates())[0])
    assert [warning for warning in comparison.warnings if "cannot be read" in warning] == [
        f"run {bad.run_id}: line 6 of its event log cannot be read and is left out"
    ]
    assert all(run.counts for run in comparison.runs)
    assert table(comparison)


@pytest.mark.parametrize(
    "line", [ODD["a list"], ODD["an unknown status"], ODD["binary"]], ids=["list", "end", "binary"]
)
def test_a_new_attempt_goes_on_after_an_odd_last_line(make_run: MakeRun, line: bytes) -> None:
    run = make_run(end=None)
    damage(run, line, place=10_000)
    before = (run.path / "journal.jsonl").read_bytes()
    with JournalWriter(run.path) as journal:
        assert journal.attempt == 2
        journal.write("note", level="info", text="on")
    assert (run.path / "journal.jsonl").read_bytes().startswith(before)
    assert len(History.load(run.path).unreadable) == 1


def test_runs_lists_a_store_with_an_odd_run_and_says_so_in_one_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("good")
    bad = make_run("bad", 1)
    damage(bad, b"[]")
    damage(bad, b"{}", place=9)
    broken = make_run("broken")
    broken.plan_file.write_text('{"recipe": {"training": {"max_steps": 3}}}')
    runs(limit=20)
    printed = capsys.readouterr().out
    assert printed.count("cannot be read") == 1
    assert f"run {bad.run_id}: line 6, line 10 of its event log cannot be read" in printed
    assert printed.count("is not a plan") == 1
    assert "good" in printed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=5), child, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(["attempt", "metrics", "facts", "layers", "proof", "memory", "examples", "note", "end", "new"])
names = ("step", "values", "from_step", "environment", "level", "text", "status", "attempt", "time")
facts = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("policies", "warmup_steps", "tokens_per_step", "eval_examples", "device"), json_values),
)
records = st.builds(
    lambda kind, some, values: HEAD | {"kind": kind, "step": 7, "values": values} | some,
    kinds,
    st.dictionaries(st.sampled_from(names), json_values, max_size=4),
    facts | json_values,
)
lines = (
    st.binary(max_size=60)
    | json_values.map(lambda v: json.dumps(v).encode())
    | records.map(lambda v: json.dumps(v).encode())
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some=st.lists(lines, min_size=1, max_size=4), place=st.integers(0, 26))
def test_no_line_in_one_journal_ends_runs_or_compare(make_run: MakeRun, some: list[bytes], place: int) -> None:
    good, bad = two_runs(make_run)
    text = (good.path / "journal.jsonl").read_bytes()
    (bad.path / "journal.jsonl").write_bytes(text)
    damage(bad, b"\n".join(some), place)
    assert describe_run(bad).state in set(State)
    comparison = compare_runs([good, bad])
    assert table(comparison)
    JournalWriter(bad.path, durable=False).close()


pairs: dict[Path, tuple[RunFolder, RunFolder]] = {}


def two_runs(make: MakeRun) -> tuple[RunFolder, RunFolder]:
    """The same two runs for every example of one test: writing them is most of the time."""
    from sparsebp_cli.run import home

    if home() not in pairs:
        pairs[home()] = (make("good", 0), make("bad", 1))
    return pairs[home()]
