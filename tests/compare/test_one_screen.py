"""Answers of verbs fit one screen of 80 columns."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sparsebp_cli.cli.app import app
from sparsebp_cli.cli.summary import summarise
from sparsebp_cli.run import History, JournalWriter, RunFolder

from .conftest import MakeRun

WIDTH, MOST_LINES, MOST_OF_A_RUN = 80, 24, 12
JUDGED = ("accuracy", "macro_f1", "mcc", "f1")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def read_lines(*words: str) -> list[str]:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= WIDTH
    return lines


def make_groups(make_run: MakeRun, num_groups: int) -> list[RunFolder]:
    """Write three seeds of each group; all but the first have a policy, a long name and another machine."""
    runs = [make_run("dense", seed) for seed in range(3)]
    for number in range(1, num_groups):
        policy: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1 * number, "along": "rows"}], "exact": False}
        policy |= {"executed": 0.5, "claimed": 0.4, "environment": {"cpu": f"cpu {number}"}}
        name = f"the-largest-rows-of-each-layer-{number}"
        runs += [make_run(name, seed, loss=3.0 + 0.01 * seed * number, **policy) for seed in range(3)]
    return runs


@pytest.mark.parametrize("num_groups", [2, 6])
def test_compare_answers_on_one_screen(make_run: MakeRun, num_groups: int) -> None:
    ids = [run.run_id for run in make_groups(make_run, num_groups)]
    lines = read_lines("compare", *ids)
    assert len(lines) <= MOST_LINES
    heading = next(place for place, line in enumerate(lines) if line.startswith("group "))
    assert lines[0] == "dense: baseline."
    verdicts = [line for line in lines[:heading] if line.startswith(("dense: ", "the-largest-rows"))]
    assert len(verdicts) == num_groups
    assert lines[heading].split()[:2] == ["group", "mean"]
    assert lines[heading].split()[-3:] == ["speed", "limit", "memory"]
    assert all(" 3 " in line or "3." in line for line in lines[heading + 1 : heading + 1 + num_groups])
    first, last = "\n".join(lines[: heading + 1]), "\n".join(lines[heading:])
    assert "warning: " not in first
    assert "warning: " in last
    assert "more: --all" in lines[-1]
    everything = read_everything(*ids)
    assert "Recipe differences" not in "".join(lines)
    assert "Recipe differences" in everything
    assert "Step: median time [quartiles]" in everything


def read_everything(*ids: str) -> str:
    return CliRunner().invoke(app, ["compare", *ids, "--all"]).output


def test_notes_that_have_no_room_are_counted(make_run: MakeRun) -> None:
    runs = make_groups(make_run, 2)
    with JournalWriter(runs[0].path) as journal:
        for number in range(40):
            journal.write("note", level="warning", text=f"the {number}th thing")
    lines = read_lines("show", runs[0].run_id)
    assert len(lines) == MOST_LINES
    told = sum("warning: the " in line for line in lines)
    assert told > 5
    assert lines[-1].startswith(f"and {40 - told} more: ")
    assert "warning: the 39th thing" in CliRunner().invoke(app, ["show", runs[0].run_id, "--all"]).output


def test_the_summary_of_a_run_has_at_most_12_lines(make_run: MakeRun) -> None:
    values = {f"{part}/{name}": 0.5 for part in ("eval", "test") for name in JUDGED} | {"test/loss": 3.0}
    values |= {"speed/speedup": 1.5, "flops/step": 2e12, "flops/step_dense": 3e12, "memory/weight_bytes": 1e9}
    run = make_run("a-run-of-a-name", policy=[{"name": "topk", "keep": 0.1, "along": "rows"}], metrics=values)
    (Path(run.path) / "model").mkdir()
    screen = io.StringIO()
    Console(width=WIDTH, file=screen).print(summarise(run, History.load(run.path), together=[run]))
    lines = screen.getvalue().splitlines()
    assert len(lines) <= MOST_OF_A_RUN
    assert {line.split()[0] for line in lines} >= {"eval", "test", "training", "cost", "speed", "memory", "next:"}
    assert "limit" in screen.getvalue()
    assert len(read_lines("show", run.run_id)) <= MOST_LINES
