"""A store of MLflow in which somebody has put values of other types costs those values, and never the others."""

from __future__ import annotations

import math
import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsebp_cli.compare import database
from sparsebp_cli.compare.database import COLUMNS, Database
from sparsebp_cli.compare.stored import StoredRun
from sparsebp_cli.errors import RunNotFoundError

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
    opened = Database(file, lambda *_: None)
    runs = {run.run_id: run for run in opened.find_runs()}
    assert runs["whole"].latest["loss"] == (3, 1_700_000_000_000, 3.0)
    assert all(math.isfinite(run.created) and run.created < 253_402_300_800 for run in runs.values())
    series = opened.find_series("loss", RUNS)
    assert series["whole"] == [(step, 1_700_000_000_000, float(step)) for step in (1, 2, 3)]
    assert all(isinstance(part, int | float) for points in series.values() for point in points for part in point)


def test_a_pipe_in_the_place_of_an_artifact_is_none(store: tuple[Path, sqlite3.Connection]) -> None:
    """Reading it would wait for a writer that never comes."""
    file, _ = store
    (file.parent / "whole").mkdir()
    os.mkfifo(file.parent / "whole" / "plan.json")
    opened = Database(file, lambda *_: None)
    (run,) = (run for run in opened.find_runs() if run.run_id == "whole")
    assert opened.read_artifact(run, "plan.json") is None


@pytest.mark.parametrize("name", ["plan.json", "history.json"])
def test_an_artifact_beyond_all_is_refused_by_its_size(name: str, store: tuple[Path, sqlite3.Connection]) -> None:
    file, _ = store
    (file.parent / "whole").mkdir()
    with (file.parent / "whole" / name).open("wb") as large:
        large.truncate(2**40)  # a hole, which takes no room
    opened = Database(file, lambda *_: None)
    (run,) = (run for run in opened.find_runs() if run.run_id == "whole")
    with pytest.raises(RunNotFoundError, match=rf"its artifact {name} has more than \d+ MiB"):
        opened.read_artifact(run, name)


class Endless:
    """MLflow's client, as far as an artifact needs it, at a server whose answer has no end."""

    def __init__(self) -> None:
        self.written = 0

    def download_artifacts(self, _run_id: str, name: str, folder: str) -> str:
        """Write as MLflow does: in pieces of a mebibyte, and an error of the disk becomes one of its own."""
        try:
            with (Path(folder) / name).open("wb") as file:
                for _ in range(10_000):
                    self.written += file.write(bytes(2**20))
        except OSError as error:
            raise RuntimeError("failed to download") from error
        return str(Path(folder) / name)


def test_an_answer_without_end_in_the_place_of_an_artifact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client, before = Endless(), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(database, "open_client", lambda _: client)
    run = StoredRun("r", "n", "FINISHED", 0.0, "e", {}, {}, {})
    with pytest.raises(RunNotFoundError, match=r"plan\.json has more than 4 MiB"):
        database.ClientSource("http://127.0.0.1:1").read_artifact(run, "plan.json")
    assert client.written <= 6 * 2**20
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
