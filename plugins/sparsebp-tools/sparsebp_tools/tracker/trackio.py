"""Write rows to trackio's local database, which ``trackio show`` shows and ``trackio.sync`` sends to a Space.

trackio's ``log`` gives each row a new id and time, so rows sent again would be duplicates. We call the function below
it, which takes both from us and skips a row whose id exists. That function is not documented, so ``pyproject.toml``
allows only tested versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from sparsebp_cli.tracker import TrackedRecord, TrackedRun, Tracker


class TrackioSession:
    """Add rows to one run; its project is the recipe's ``tracking.experiment``."""

    place: str

    def __init__(self, run: TrackedRun) -> None:
        """Import trackio, which finds its databases from the environment; nothing is written yet."""
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
        """Do nothing: a session holds nothing between writes."""


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys and values, which suit trackio's table of settings."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _flatten(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


TRACKIO = Tracker(TrackioSession, package="trackio", install="sparsebp-tools[trackio]")
