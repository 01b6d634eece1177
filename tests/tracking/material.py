"""Journals as a worker writes them, and the rows of a store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.run import JournalWriter, RunFolder, create_run

START = 1_700_000_000.0
Row = tuple[str, int, int, float, int]


def write_run(steps: int, *, end: str | None, provenance: Provenance | None = None, **sections: Any) -> RunFolder:
    """Make a run with a plan and a journal of some steps; ``sections`` are those of its recipe."""
    recipe = {"version": 1, "name": "demo", "model": {"name": "m"}, "dataset": {"name": "d"}} | sections
    plan = Plan.model_validate({"recipe": recipe, "created": START, "provenance": provenance or Provenance()})
    run = create_run(plan.run_id)
    plan.save(run.path)
    attempt(run, 0, steps, end=end)
    return run


def attempt(run: RunFolder, from_step: int, to_step: int, *, end: str | None = "finished", bias: float = 0.0) -> None:
    """Write what one attempt of the worker writes."""
    with JournalWriter(run.path, durable=False) as journal:
        journal.write("attempt", from_step=from_step, environment={"cpu": "a cpu", "attempt": journal.attempt})
        journal.write("facts", values={"dataset_digest": "abc"})
        for step in range(from_step + 1, to_step + 1):
            journal.write(
                "metrics", step=step, values={"train/loss": 3.0 / step + bias, "time/step_seconds": 0.1 + bias}
            )
        if end:
            journal.write("end", status=end, step=to_step, text="all is well" if end == "finished" else "something")


def metric_rows(database: Path) -> list[Row]:
    """Return (key, step, time, value, is_nan) of every row of a store."""
    with sqlite3.connect(database) as connection:
        found = connection.execute(
            "select key, step, timestamp, value, is_nan from metrics order by 1, 2, 3, 4"
        ).fetchall()
    connection.close()
    return found
