"""A store of MLflow in which somebody has put values of other types costs those values, and never the others."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sparsebp_cli.compare import stored
from sparsebp_cli.compare.stored import Store
from sparsebp_cli.errors import RunNotFoundError
from tests.compare.database import ForeignStore

pytestmark = pytest.mark.promise("R37")
START = 1_700_000_000_000  # of the first run of a store
SPOILS = {
    "a text as a value": "UPDATE latest_metrics SET value = 'x' WHERE run_uuid = ?",
    "bytes as a value": "UPDATE metrics SET value = x'ff00' WHERE run_uuid = ?",
    "a text as a step": "UPDATE metrics SET step = 'x' WHERE run_uuid = ?",
    "a step beyond all": "UPDATE latest_metrics SET step = -9223372036854775808 WHERE run_uuid = ?",
    "a text as a time": "UPDATE metrics SET timestamp = timestamp || 'x' WHERE run_uuid = ?",
    "bytes as a name": "UPDATE runs SET name = x'ff00' WHERE run_uuid = ?",
    "a text as a start": "UPDATE runs SET start_time = 'x' WHERE run_uuid = ?",
    "a start beyond all": "UPDATE runs SET start_time = 9223372036854775807 WHERE run_uuid = ?",
    "bytes as a tag": "UPDATE tags SET value = x'ff00' WHERE run_uuid = ?",
}


@pytest.fixture
def store(fresh_database: Path, tmp_path: Path) -> ForeignStore:
    """A store with two runs of three steps."""
    found = ForeignStore(Path(shutil.copy(fresh_database, tmp_path / "mlflow.db")))
    for name in ("spoilt", "whole"):
        found.add(name, {}, {"loss": [(step, 0, float(step)) for step in (1, 2, 3)]}, {"k": "v"})
    return found


SPOILT, WHOLE = f"{1:032x}", f"{2:032x}"


@pytest.mark.parametrize("statement", SPOILS.values(), ids=SPOILS)
def test_a_value_of_another_type_costs_at_most_its_run(statement: str, store: ForeignStore) -> None:
    with closing(sqlite3.connect(store.file)) as tables, tables:
        tables.execute(statement, (SPOILT,))
    opened = Store(store.uri)
    runs = {run.run_id: run for run in opened.find_runs()}
    assert runs[WHOLE].latest["loss"] == (3, START + 2000, 3.0)
    assert all(math.isfinite(run.created) and run.created < 253_402_300_800 for run in runs.values())
    for run_id in (SPOILT, WHOLE):
        opened.choose(run_id)
    series = {run_id: opened.find_points("loss", run_id) for run_id in (SPOILT, WHOLE)}
    assert sorted(series[WHOLE]) == [(step, START + 2000, float(step)) for step in (1, 2, 3)]
    assert all(isinstance(part, int | float) for points in series.values() for point in points for part in point)


def test_a_pipe_in_the_place_of_an_artifact_is_none(store: ForeignStore) -> None:
    """Reading it would wait for a writer that never comes."""
    (store.file.parent / WHOLE).mkdir()
    os.mkfifo(store.file.parent / WHOLE / "plan.json")
    assert Store(store.uri).read_artifact(WHOLE, "plan.json") is None


@pytest.mark.parametrize("name", ["plan.json", "history.json"])
def test_an_artifact_beyond_all_is_refused_by_its_size(name: str, store: ForeignStore) -> None:
    (store.file.parent / WHOLE).mkdir()
    with (store.file.parent / WHOLE / name).open("wb") as large:
        large.truncate(2**40)  # a hole, which takes no room
    with pytest.raises(RunNotFoundError, match=rf"its artifact {name} has more than \d+ MiB"):
        Store(store.uri).read_artifact(WHOLE, name)


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
    monkeypatch.setattr(stored, "open_client", lambda _: client)
    with pytest.raises(RunNotFoundError, match=r"plan\.json has more than 4 MiB"):
        Store("http://127.0.0.1:1").read_artifact("r", "plan.json")
    assert client.written <= 6 * 2**20
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
