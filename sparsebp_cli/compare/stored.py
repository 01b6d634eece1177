"""An MLflow store and its runs, read by MLflow's client. Metrics are read on first use, for all chosen runs at once.

A comparison needs a dozen of the dozens of metrics that a run logged. Its options determine which, so the first access
to a metric sends the requests for it.
"""

from __future__ import annotations

import math
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from sparsebp_cli.compare.archive import make_folder
from sparsebp_cli.errors import RunNotFoundError, TrackingError
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, LARGEST_PLAN, limit_files, read_json
from sparsebp_cli.run.series import Series
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import is_sqlite, one_line, open_client, restore_infinity

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

PAGE = 1000  # runs per query; MLflow's limit is 50,000
REQUESTS_AT_ONCE = 8  # to a server
LARGEST = {"plan.json": LARGEST_PLAN}  # LARGEST_ARTIFACT for others
LATEST_MS = 253_402_300_800_000  # the end of the year 9999
BUSY_SECONDS = 30.0  # a run may be writing


class Point(NamedTuple):
    """One value of a metric."""

    step: int
    time_ms: int  # since 1970
    value: float


@dataclass(frozen=True)
class StoredRun:
    """A run of a store."""

    run_id: str  # the store's id
    name: str  # its name in the store's list
    status: str  # MLflow's spelling
    created: float  # seconds since 1970
    experiment: str  # name of its experiment
    params: Mapping[str, str]  # parameter to text
    tags: Mapping[str, str]  # tag to text
    latest: Mapping[str, Point]  # metric to the value in the store's own list


class Store:
    """A store behind MLflow's client, which is imported at the first request."""

    def __init__(self, uri: str) -> None:
        """Store the URI, with its password, without opening anything."""
        self.uri = uri
        self._chosen: dict[str, None] = {}
        self._found: dict[str, dict[str, Sequence[Point]]] = {}

    @cached_property
    def _client(self) -> MlflowClient:
        return open_client(_copy(sqlite_file(self.uri)), upgrade=True) if is_sqlite(self.uri) else open_client(self.uri)

    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted, with one query per thousand runs. Raise ``TrackingError`` if the store
        does not answer."""
        try:
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
        except Exception as error:  # errors of MLflow, requests, sqlalchemy and the system
            raise self._error(error) from error

    def choose(self, run_id: str) -> None:
        """Read the metrics of this run, too, whenever those of a chosen run are read."""
        self._chosen[run_id] = None

    def find_points(self, name: str, run_id: str) -> Sequence[Point]:
        """Return the values of a metric of a chosen run, in any order. Read them for every chosen run that lacks them,
        with one request per run, several at once. Raise ``TrackingError`` if the store does not answer."""

        def query(run_id: str) -> list[Point]:
            return [*filter(None, map(_read_point, self._client.get_metric_history(run_id, name)))]

        known = self._found.setdefault(name, {})
        if run_id not in known:
            missing = [run for run in self._chosen if run not in known]
            try:
                with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
                    known |= zip(missing, pool.map(query, missing), strict=True)
            except Exception as error:
                raise self._error(error) from error
        return known[run_id]

    def read_artifact(self, run_id: str, name: str) -> dict[str, object] | None:
        """Return an artifact that is a JSON object; None if it was never sent, or cannot be reached. Raise
        ``RunNotFoundError`` if it is too large."""
        largest = LARGEST.get(name, LARGEST_ARTIFACT)
        with tempfile.TemporaryDirectory() as folder:
            try:
                with limit_files(largest + 1):
                    file = Path(self._client.download_artifacts(run_id, name, folder))
                content = read_json(file, largest)
            except Exception:  # never sent, on another machine, too large, or no JSON
                if any(file.stat().st_size > largest for file in Path(folder).rglob(name)):
                    raise RunNotFoundError(f"its artifact {name} has more than {largest >> 20} MiB") from None
                return None
        return content if isinstance(content, dict) else None

    def _error(self, error: Exception) -> TrackingError:
        return TrackingError(f"tracking store {mask(self.uri)}: {one_line(error)}")


def _copy(file: Path) -> str:
    """Return the address of a copy of a sqlite store. MLflow's client brings a store of an earlier version to its own,
    but reading a store must not change it."""
    copy = make_folder() / "mlflow.db"
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as store:
            store.execute("VACUUM INTO ?", (str(copy),))
    except sqlite3.OperationalError as error:
        if "readonly" not in str(error):
            raise
        # A store with a write-ahead log, in a folder that this user may not write to.
        for suffix in ("", "-wal"):
            if (part := file.with_name(file.name + suffix)).exists():
                shutil.copyfile(part, copy.with_name(copy.name + suffix))
    return f"sqlite:///{copy}"


def _all_pages(query: Callable[[str | None], Any]) -> Iterator[Any]:
    page = None
    while True:
        found = query(page)
        yield from found
        page = found.token
        if not page:
            return


def _describe(run: Run, experiment: str) -> StoredRun:
    return StoredRun(
        run.info.run_id,
        str(run.info.run_name or ""),
        str(run.info.status),
        _whole(run.info.start_time) / 1000,
        experiment,
        {key: str(value or "") for key, value in run.data.params.items()},
        {key: str(value or "") for key, value in run.data.tags.items()},
        # The public `metrics` (MLflow 3.17) lacks a value's step, which tells how far a run came.
        {one.key: _read_point(one) or Point(0, 0, math.nan) for one in run.data._metric_objs},  # noqa: SLF001
    )


def _read_point(one: Metric) -> Point | None:
    """Return a value; None without a step or time. A store may hold anything: sqlite accepts text in any column."""
    if not (_is_number(one.step) and _is_number(one.timestamp)):
        return None
    value = restore_infinity(float(one.value)) if isinstance(one.value, int | float) else math.nan
    return Point(int(one.step), _whole(one.timestamp), value)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _whole(value: object) -> int:
    """Return a time as an integer; 0 if it is not a number, or beyond every calendar."""
    return int(value) if _is_number(value) and abs(value) < LATEST_MS else 0


class StoredMetrics(MutableMapping[str, Series]):
    """The metrics of one run, as :class:`~sparsebp_cli.run.History` holds them: name to step to (seconds, value)."""

    def __init__(self, store: Store, run: StoredRun, *, first_counts: bool) -> None:
        """Choose the run without reading anything. If a step has several values, ``first_counts`` takes the first, as
        in SparseBP's event logs; otherwise the latest counts, as in the store's list."""
        store.choose(run.run_id)
        self._store, self._run, self._first_counts = store, run, first_counts
        self._known: dict[str, Series] = {}
        self._names = dict.fromkeys(run.latest)

    def __getitem__(self, name: str) -> Series:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            points = self._store.find_points(name, self._run.run_id)
            found = {step: (time_ms / 1000, value) for step, time_ms, value in points}
            if len(found) < len(points):  # some step has several values: choose one
                points = sorted(points, key=_sort_by_time, reverse=self._first_counts)
                found = {step: (time_ms / 1000, value) for step, time_ms, value in points}
            self._known[name] = Series(dict(sorted(found.items())))
        return self._known[name]

    def __setitem__(self, name: str, points: Series) -> None:
        self._known[name] = points
        self._names[name] = None

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _sort_by_time(point: Point) -> tuple[int, float]:
    """Return a key that sorts a step's values as MLflow does: in one millisecond the largest is last, NaN as 0."""
    return point.time_ms, 0.0 if math.isnan(point.value) else point.value
