"""Runs of an MLflow store as rows, and their metrics read when they are asked for: name by name, for all runs at once.

A comparison reads a dozen of the dozens of metrics that a run logged. Which ones depends on what is asked, so nothing
lists them: whoever takes a metric's values causes the one query for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Point = tuple[int, int, float]  # of one run and one metric: step, milliseconds since 1970, value


class Row(NamedTuple):
    """The value of a metric that a store's list shows: a point with names."""

    step: int
    time_ms: int
    value: float


@dataclass(frozen=True)
class StoredRun:
    """One run of a store.

    Args:
        run_id: The store's id.
        name: What its list shows.
        status: MLflow's word.
        created: Seconds since 1970.
        experiment: Name of its experiment.
        params: Parameter to text.
        tags: Tag to text.
        latest: Metric to the value that the store's own list shows.
        artifacts: The address of its folder; empty when only the server knows.
    """

    run_id: str
    name: str
    status: str
    created: float
    experiment: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    latest: Mapping[str, Row]
    artifacts: str = ""


class Source(Protocol):
    """A store that is open."""

    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted."""

    def find_series(self, name: str, run_ids: Sequence[str]) -> Mapping[str, Sequence[Point]]:
        """Return the values of one metric by run, in any order; runs without it may be absent."""

    def read_artifact(self, run: StoredRun, name: str) -> dict[str, Any] | None:
        """Return an artifact that is a JSON object; None when it was never sent, or cannot be reached."""


def sort_by_time(point: Point) -> tuple[int, float]:
    """Order values of one step as MLflow does: of those of one millisecond the largest is the latest, NaN being 0."""
    return point[1], 0.0 if math.isnan(point[2]) else point[2]


@dataclass
class Batch:
    """The runs of a store that were chosen, and those of their metrics that were asked for.

    Args:
        find: The source's ``find_series``; errors of the store are its own affair.
        runs: Ids of the runs.
    """

    find: Callable[[str, Sequence[str]], Mapping[str, Sequence[Point]]]
    runs: dict[str, None] = field(default_factory=dict)
    _found: dict[str, dict[str, Sequence[Point]]] = field(default_factory=dict)

    def points(self, name: str, run_id: str) -> Sequence[Point]:
        """Return a metric's values of one run, reading them for every run of the batch that lacks them."""
        known = self._found.setdefault(name, {})
        if run_id not in known:
            missing = [run for run in self.runs if run not in known]
            found = self.find(name, missing)
            known |= {run: found.get(run, ()) for run in missing}
        return known[run_id]


class StoredMetrics(MutableMapping[str, dict[int, tuple[float, float]]]):
    """The metrics of one run, as :class:`~sparsebp_cli.run.History` holds them: name to step to (seconds, value)."""

    def __init__(self, batch: Batch, run: StoredRun, *, first_counts: bool) -> None:
        """Take the run into the batch; nothing is read.

        Args:
            batch: Of the store.
            run: The run.
            first_counts: Of several values at a step the first is the run's, as in our journals; else the latest, which
                is the one that the store's list shows.
        """
        batch.runs[run.run_id] = None
        self._batch, self._run, self._first_counts = batch, run, first_counts
        self._known: dict[str, dict[int, tuple[float, float]]] = {}
        self._names = dict.fromkeys(run.latest)

    def __getitem__(self, name: str) -> dict[int, tuple[float, float]]:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            points = self._batch.points(name, self._run.run_id)
            found = {step: (time_ms / 1000, value) for step, time_ms, value in points}
            if len(found) < len(points):  # which of several values at a step is the run's
                points = sorted(points, key=sort_by_time, reverse=self._first_counts)
                found = {step: (time_ms / 1000, value) for step, time_ms, value in points}
            self._known[name] = found
        return self._known[name]

    def __setitem__(self, name: str, points: dict[int, tuple[float, float]]) -> None:
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
