"""A store with runs of other programs, written by SQL: what MLflow's client would write, without its seconds a run."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

COLUMNS = "(key, value, is_nan, timestamp, step, run_uuid) VALUES (?, ?, ?, ?, ?, ?)"

Point = tuple[int, int, float]  # step, milliseconds, value


class ForeignStore:
    """An sqlite store to which runs are added.

    Args:
        file: A copy of an initialised store.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.uri = f"sqlite:///{file}"
        self._count = 0

    def add(
        self,
        name: str,
        params: Mapping[str, object],
        metrics: Mapping[str, Sequence[Point]],
        tags: Mapping[str, str] | None = None,
        status: str = "FINISHED",
    ) -> str:
        """Log one run and return its id."""
        self._count += 1
        run_id = f"{self._count:032x}"
        begin = 1_700_000_000_000 + 1000 * self._count
        with closing(sqlite3.connect(self.file)) as database, database:
            database.execute(
                "INSERT INTO runs (run_uuid, name, status, start_time, lifecycle_stage, artifact_uri, experiment_id, "
                "source_type, source_name, entry_point_name, user_id, source_version) "
                "VALUES (?, ?, ?, ?, 'active', ?, 0, 'LOCAL', '', '', '', '')",
                (run_id, name, status, begin, str(self.file.parent / run_id)),
            )
            database.executemany(
                "INSERT INTO params VALUES (?, ?, ?)", [(k, str(v), run_id) for k, v in params.items()]
            )
            told = {"mlflow.runName": name} | dict(tags or {})
            database.executemany("INSERT INTO tags VALUES (?, ?, ?)", [(k, v, run_id) for k, v in told.items()])
            for key, points in metrics.items():
                rows = [(key, *_value(v), begin + t, step, run_id) for step, t, v in points]
                database.executemany(
                    "INSERT INTO metrics (key, value, is_nan, timestamp, step, run_uuid) VALUES (?, ?, ?, ?, ?, ?)",
                    rows,
                )
                last = max(rows, key=lambda row: (row[4], row[3], row[1]))
                database.execute(
                    f"INSERT INTO latest_metrics {COLUMNS}",
                    last,
                )
        return run_id


def _value(value: float) -> tuple[float, int]:
    return (0.0, 1) if math.isnan(value) else (value, 0)
