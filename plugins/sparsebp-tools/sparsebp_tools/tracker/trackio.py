"""trackio: rows of its local database, which ``trackio show`` shows, and ``trackio.sync`` sends to a Space.

Its ``log`` gives each row an id and a time of its own, so rows that are sent again would be there twice. We write by
the function below it, which takes both from us and leaves out a row whose id is there. It is no documented part of
trackio, so ``pyproject.toml`` allows the versions alone that were tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from sparsebp_cli.tracker import TrackedRecord, TrackedRun, Tracker


class TrackioSession:
    """Adds to the rows of one run; its project is the recipe's ``tracking.experiment``."""

    place: str

    def __init__(self, run: TrackedRun) -> None:
        """Import trackio, whose environment says where its databases are; nothing is written yet."""
        from trackio.sqlite_storage import SQLiteStorage

        self._store = SQLiteStorage
        SQLiteStorage.validate_project_name(run.experiment)
        self._run = run
        self._config: dict[str, object] | None = dict(_flatten(run.recipe))  # sent once a session
        self.place = str(SQLiteStorage.get_project_db_path(run.experiment))

    def write(self, records: Sequence[TrackedRecord]) -> None:
        """Add a row for each record of metrics."""
        rows = [record for record in records if record.metrics]
        if not rows:
            return
        self._store.bulk_log(
            self._run.experiment,
            self._run.title,
            [dict(row.metrics) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
            config=self._config,
            log_ids=[f"{self._run.run_id}/{row.id}" for row in rows],
            run_id=self._run.run_id,
        )
        self._config = None

    def close(self) -> None:
        """Nothing is held between writes."""


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values, as trackio's table of settings shows them best."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _flatten(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


TRACKIO = Tracker(TrackioSession, package="trackio", install="sparsebp-tools[trackio]")
