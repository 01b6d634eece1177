"""Reads an MLflow store through its client: servers, databases other than sqlite, unknown schemas."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.stored import MetricRow, Point, StoredRun
from sparsebp_cli.tracking.store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAGE = 1000  # runs a query; MLflow's limit is 50,000
AT_ONCE = 8  # concurrent requests to a server


class ClientSource:
    """A store behind MLflow's client, which is imported at the first request."""

    def __init__(self, uri: str) -> None:
        """Keep the store's URI, with its password; nothing is opened yet."""
        self._uri = uri

    @cached_property
    def _client(self) -> MlflowClient:
        return open_client(self._uri)

    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted; one query a thousand runs."""
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
        """Return the values of one metric by run: one request a run, several at once."""

        def query(run_id: str) -> list[Point]:
            found = self._client.get_metric_history(run_id, name)
            return [(int(point.step), int(point.timestamp), float(point.value)) for point in found]

        if not run_ids:
            return {}
        _ = self._client  # import mlflow in one thread, before the pool uses it
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(run_ids, pool.map(query, run_ids), strict=True))

    def read_artifact(self, run: StoredRun, name: str) -> dict[str, Any] | None:
        """Return an artifact that is a JSON object."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                content = json.loads(Path(self._client.download_artifacts(run.run_id, name, folder)).read_bytes())
            except Exception:  # it was never sent, or its folder is on another machine
                return None
        return content if isinstance(content, dict) else None


def _all_pages(query: Callable[[str | None], Any]) -> Iterator[Any]:
    page = None
    while True:
        found = query(page)
        yield from found
        page = found.token
        if not page:
            return


def _describe(run: Run, experiment: str) -> StoredRun:
    # `_metric_objs` (MLflow 3.17): the public `metrics` lacks the step of a value, which tells how far a run came.
    points = getattr(run.data, "_metric_objs", None)
    if points is None:
        latest = {name: MetricRow(0, 0, float(value)) for name, value in run.data.metrics.items()}
    else:
        latest = {p.key: MetricRow(int(p.step), int(p.timestamp), float(p.value)) for p in points}
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
