"""Read MLflow's sqlite file by SQL, because MLflow's client builds one object per value and takes 40 times as long.

The tables are MLflow's and may change. A file without the expected columns is read through MLflow's client.
"""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import unquote, urlsplit

from sparsebp_cli.compare.stored import MetricRow, Point, Source, StoredRun
from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, LARGEST_PLAN, limit_files, read_json
from sparsebp_cli.tracking.store import open_client, restore_infinity

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


ReadArtifact = Callable[[StoredRun, str], dict[str, object] | None]

COLUMNS = {  # found in MLflow 2.0 to 3.17
    "experiments": {"experiment_id", "name", "lifecycle_stage"},
    "runs": {"run_uuid", "name", "status", "start_time", "lifecycle_stage", "artifact_uri", "experiment_id"},
    "params": {"run_uuid", "key", "value"},
    "tags": {"run_uuid", "key", "value"},
    "metrics": {"run_uuid", "key", "value", "timestamp", "step", "is_nan"},
    "latest_metrics": {"run_uuid", "key", "value", "timestamp", "step", "is_nan"},
}
IDS_AT_ONCE = 500  # in one query; old builds of sqlite allow 999
REQUESTS_AT_ONCE = 8  # to a server
LARGEST = {"plan.json": LARGEST_PLAN}  # LARGEST_ARTIFACT for others
NAN = float("nan")
LATEST_MS = 253_402_300_800_000  # the end of the year 9999
BUSY_SECONDS = 30.0  # a run may be writing

ACTIVE = "experiments.lifecycle_stage = 'active' AND runs.lifecycle_stage = 'active'"
RUNS = (
    "SELECT run_uuid, runs.name, status, start_time, artifact_uri, experiments.name FROM runs "
    f"JOIN experiments ON experiments.experiment_id = runs.experiment_id WHERE {ACTIVE}"
)
LATEST = "SELECT run_uuid, key, step, timestamp, value, is_nan FROM latest_metrics"
SERIES = "SELECT run_uuid, step, timestamp, value, is_nan FROM metrics WHERE key = ? AND run_uuid IN ({})"


class Database(Source):
    """An MLflow store in a sqlite file, opened read-only."""

    def __init__(self, file: Path, elsewhere: ReadArtifact) -> None:
        """Store the file. ``elsewhere`` reads artifacts that are in no folder of this machine."""
        self._elsewhere = elsewhere
        # Open read-only, because MLflow may be writing, and reading a store must not change it.
        self._address = f"{file.absolute().as_uri()}?mode=ro"

    def is_known(self) -> bool:
        """Return whether the file has every column that is read here."""
        try:
            with closing(self._open()) as database:
                return all(
                    columns <= {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
                    for table, columns in COLUMNS.items()
                )
        except sqlite3.Error:
            return False

    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted."""
        with closing(self._open()) as database:
            params, tags = (
                _pairs(database.execute(f"SELECT run_uuid, key, value FROM {t}")) for t in ("params", "tags")
            )
            latest: dict[str, dict[str, MetricRow]] = defaultdict(dict)
            for run_id, key, *row in database.execute(LATEST):
                latest[run_id][key] = _row(*row)
            rows = list(database.execute(RUNS))
        return [
            StoredRun(
                run_id,
                str(name or tags[run_id].get("mlflow.runName") or ""),
                str(status or ""),
                _whole(start) / 1000,
                str(experiment),
                params[run_id],
                tags[run_id],
                latest[run_id],
                str(artifacts or ""),
            )
            for run_id, name, status, start, artifacts, experiment in rows
        ]

    def find_series(self, name: str, run_ids: Sequence[str]) -> Mapping[str, Sequence[Point]]:
        """Return the values of one metric by run."""
        found: dict[str, list[Point]] = defaultdict(list)
        with closing(self._open()) as database:
            for start in range(0, len(run_ids), IDS_AT_ONCE):
                some = run_ids[start : start + IDS_AT_ONCE]
                question = SERIES.format(", ".join("?" * len(some)))
                for run_id, step, time_ms, value, is_nan in database.execute(question, (name, *some)):
                    if is_number(step) and is_number(time_ms):  # sqlite accepts text in any column
                        found[run_id].append((int(step), int(time_ms), _value(value, is_nan)))
        return found

    def read_artifact(self, run: StoredRun, name: str) -> dict[str, object] | None:
        """Return an artifact that is a JSON object. Raise ``RunNotFoundError`` if it is too large."""
        address = urlsplit(run.artifacts)
        if address.scheme not in {"", "file"} or address.netloc not in {"", "localhost"}:
            return self._elsewhere(run, name)
        return _read_object(Path(unquote(address.path)) / name)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._address, uri=True, timeout=BUSY_SECONDS)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of the store is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _row(step: object, time_ms: object, value: object, is_nan: object) -> MetricRow:
    return MetricRow(_whole(step), _whole(time_ms), _value(value, is_nan))


def _value(value: object, is_nan: object) -> float:
    return restore_infinity(float(value)) if isinstance(value, int | float) and not is_nan else NAN


def _whole(value: object) -> int:
    """Return a number of the store as an integer; 0 if it is not a number, or beyond every calendar."""
    return int(value) if is_number(value) and abs(value) < LATEST_MS else 0


def _pairs(rows: Iterator[tuple[str, str, object]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for run_id, key, value in rows:
        found[run_id][key] = str(value or "")
    return found


PAGE = 1000  # runs per query; MLflow's limit is 50,000


class ClientSource(Source):
    """A store behind MLflow's client, which is imported at the first request."""

    def __init__(self, uri: str) -> None:
        """Store the URI, with its password, without opening anything."""
        self._uri = uri

    @cached_property
    def _client(self) -> MlflowClient:
        return open_client(self._uri)

    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted, with one query per thousand runs."""
        client = self._client
        experiments = {
            str(e.experiment_id): str(e.name)
            for e in _all_pages(lambda page: client.search_experiments(max_results=PAGE, page_token=page))
        }
        if not experiments:
            return []
        ids = list(experiments)
        runs = _all_pages(lambda page: client.search_runs(ids, max_results=PAGE, page_token=page))
        return [_describe(run, experiments[str(run.info.experiment_id)]) for run in runs]

    def find_series(self, name: str, run_ids: Sequence[str]) -> Mapping[str, Sequence[Point]]:
        """Return the values of one metric by run, with one request per run, several at once."""

        def query(run_id: str) -> list[Point]:
            found = self._client.get_metric_history(run_id, name)
            return [(int(one.step), int(one.timestamp), restore_infinity(float(one.value))) for one in found]

        if not run_ids:
            return {}
        _ = self._client  # import mlflow in one thread, before the pool uses it
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return dict(zip(run_ids, pool.map(query, run_ids), strict=True))

    def read_artifact(self, run: StoredRun, name: str) -> dict[str, object] | None:
        """Return an artifact that is a JSON object. Raise ``RunNotFoundError`` if it is too large."""
        largest = LARGEST.get(name, LARGEST_ARTIFACT)
        with tempfile.TemporaryDirectory() as folder:
            try:
                with limit_files(largest + 1):
                    file = Path(self._client.download_artifacts(run.run_id, name, folder))
            except Exception:  # never sent, on another machine, or too large
                for file in Path(folder).rglob(name):
                    _refuse_large(file)
                return None
            return _read_object(file)


def _read_object(file: Path) -> dict[str, object] | None:
    """Return the JSON object in a file; None if there is none."""
    _refuse_large(file)
    try:
        content = read_json(file, LARGEST.get(file.name, LARGEST_ARTIFACT))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _refuse_large(file: Path) -> None:
    largest = LARGEST.get(file.name, LARGEST_ARTIFACT)
    if file.is_file() and file.stat().st_size > largest:
        raise RunNotFoundError(f"its artifact {file.name} has more than {largest >> 20} MiB")


def _all_pages(query: Callable[[str | None], Any]) -> Iterator[Any]:
    page = None
    while True:
        found = query(page)
        yield from found
        page = found.token
        if not page:
            return


def _describe(run: Run, experiment: str) -> StoredRun:
    # Use `_metric_objs` (MLflow 3.17): the public `metrics` lacks a value's step, which tells how far a run came.
    points = getattr(run.data, "_metric_objs", None)
    if points is None:
        latest = {name: MetricRow(0, 0, restore_infinity(float(value))) for name, value in run.data.metrics.items()}
    else:
        latest = {p.key: MetricRow(int(p.step), int(p.timestamp), restore_infinity(float(p.value))) for p in points}
    return StoredRun(
        run.info.run_id,
        str(run.info.run_name or ""),
        str(run.info.status),
        (run.info.start_time or 0) / 1000,
        experiment,
        dict(run.data.params),
        dict(run.data.tags),
        latest,
        str(run.info.artifact_uri or ""),
    )
