"""What the journal lost behind a good checkpoint is told when the run goes on; what it has is not written twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.worker.resume_check import find_journal_gaps
from tests.worker.conftest import work

Record = dict[str, Any]


def history(path: Any, steps: Iterable[int], evaluated: Iterable[int]) -> History:
    with JournalWriter(path, durable=False) as journal:
        for step in steps:
            journal.write("metrics", step=step, values={"train/loss": 1.0, "time/step_seconds": 0.1})
        journal.write("metrics", step=3, values={"speed/speedup": 1.5})  # of a probe: not of every step
        for step in evaluated:
            journal.write("metrics", step=step, values={"eval/loss": 2.0})
    return History.load(path)


@pytest.mark.parametrize(
    ("steps", "evaluated", "found"),
    [
        (range(1, 10), (0, 5), []),
        (range(1, 6), (0, 5), ["train/loss, time/step_seconds of steps 6 to 8"]),
        ((1, 2, 4, 8), (0,), ["train/loss, time/step_seconds of steps 3, 5 to 7", "eval/loss of step 5"]),
        ((), (), ["all metrics of steps 1 to 8", "eval/loss of steps 0, 5"]),
    ],
)
def test_lost_steps_are_named_with_their_metrics(tiny_recipe, tmp_path, steps, evaluated, found) -> None:
    lines = find_journal_gaps(history(tmp_path, steps, evaluated), 8, tiny_recipe())
    assert [line.removeprefix("the event log lacks ").partition(", although")[0] for line in lines] == found


def edit_journal(run: RunFolder, keep: Callable[[Record], bool]) -> None:
    file = run.path / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if keep(json.loads(line))))


@pytest.mark.slow
def test_a_run_that_goes_on_tells_the_gap_and_writes_no_proof_twice(tiny_recipe, prepared) -> None:
    policy = [{"name": "random", "keep": 0.5, "along": "rows"}]
    run = prepared(tiny_recipe(policy=policy, measure={"eval_every": 5, "eval_examples": 8, "probe_every": 2}))
    assert work(run) == 0
    proofs = proofs_of(run)
    edit_journal(run, lambda record: record["kind"] != "end" and record.get("step") != 7)
    with (run.path / "journal.jsonl").open("ab") as file:
        file.write(b"[]\n")
    assert work(run) == 0  # from step 8 on
    warnings = [text for _, level, text in History.load(run.path).notes if level == "warning"]
    assert [text.partition(" of step")[0].partition(",")[0] for text in warnings if "lacks" in text] == [
        "the event log lacks train/loss"
    ]
    assert "of step 7, although the checkpoint of step 8 is later; going on from step 8" in " ".join(warnings)
    assert any("cannot be read" in text for text in warnings)
    assert proofs_of(run) == proofs


def proofs_of(run: RunFolder) -> list[int]:
    lines = (run.path / "journal.jsonl").read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if isinstance(record, dict) and record["kind"] == "proof"]
