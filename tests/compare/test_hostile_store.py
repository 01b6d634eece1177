"""A store of MLflow in which somebody has put values of other types costs those values, and never the others."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.compare.database import COLUMNS, Database

pytestmark = pytest.mark.promise("R37")
RUNS = ("spoilt", "whole")
SPOILS = {
    "a text as a value": "UPDATE latest_metrics SET value = 'x' WHERE run_uuid = 'spoilt'",
    "bytes as a value": "UPDATE metrics SET value = x'ff00' WHERE run_uuid = 'spoilt'",
    "a text as a step": "UPDATE metrics SET step = 'x' WHERE run_uuid = 'spoilt'",
    "a step beyond all": "UPDATE latest_metrics SET step = -9223372036854775808 WHERE run_uuid = 'spoilt'",
    "no time": "UPDATE metrics SET timestamp = NULL WHERE run_uuid = 'spoilt'",
    "bytes as a name": "UPDATE runs SET name = x'ff00' WHERE run_uuid = 'spoilt'",
    "a text as a start": "UPDATE runs SET start_time = 'x' WHERE run_uuid = 'spoilt'",
    "a start beyond all": "UPDATE runs SET start_time = 9223372036854775807 WHERE run_uuid = 'spoilt'",
    "bytes as a tag": "UPDATE tags SET value = x'ff00' WHERE run_uuid = 'spoilt'",
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A file with MLflow's tables and two runs of three steps."""
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as tables:
        for table, columns in COLUMNS.items():
            tables.execute(f"CREATE TABLE {table} ({', '.join(sorted(columns))})")
        tables.execute("INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (1, 'e', 'active')")
        for run in RUNS:
            tables.execute(
                "INSERT INTO runs (run_uuid, name, status, start_time, lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?, 'n', 'FINISHED', 1700000000000, 'active', ?, 1)",
                (run, f"file://{tmp_path}/{run}"),
            )
            tables.execute("INSERT INTO tags (run_uuid, key, value) VALUES (?, 'k', 'v')", (run,))
            row = "(run_uuid, key, value, timestamp, step, is_nan) VALUES (?, 'loss', ?, 1700000000000, ?, 0)"
            tables.execute(f"INSERT INTO latest_metrics {row}", (run, 3.0, 3))
            for step in (1, 2, 3):
                tables.execute(f"INSERT INTO metrics {row}", (run, float(step), step))
    yield file, tables
    tables.close()


@pytest.mark.parametrize("statement", SPOILS.values(), ids=SPOILS)
def test_a_value_of_another_type_costs_at_most_its_run(statement: str, store: tuple[Path, sqlite3.Connection]) -> None:
    file, tables = store
    with tables:
        tables.execute(statement)
    database = Database(file, lambda *_: None)
    runs = {run.run_id: run for run in database.find_runs()}
    assert runs["whole"].latest["loss"] == (3, 1_700_000_000_000, 3.0)
    assert all(math.isfinite(run.created) and run.created < 253_402_300_800 for run in runs.values())
    series = database.find_series("loss", RUNS)
    assert series["whole"] == [(step, 1_700_000_000_000, float(step)) for step in (1, 2, 3)]
    assert all(isinstance(part, int | float) for points in series.values() for point in points for part in point)


def test_a_pipe_in_the_place_of_an_artifact_is_none(store: tuple[Path, sqlite3.Connection]) -> None:
    """Reading it would wait for a writer that never comes."""
    file, _ = store
    (file.parent / "whole").mkdir()
    os.mkfifo(file.parent / "whole" / "plan.json")
    database = Database(file, lambda *_: None)
    (run,) = (run for run in database.find_runs() if run.run_id == "whole")
    assert database.read_artifact(run, "plan.json") is None
