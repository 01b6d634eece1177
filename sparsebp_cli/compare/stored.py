"""Runs of an MLflow store, whose metrics are read on first use: one query per metric, for all runs at once.

A comparison needs a dozen of the dozens of metrics that a run logged. Its options determine which, so the first access
to a metric sends the query for it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparsebp_cli.run.series import Series

Point = tuple[int, int, float]  # of one run and one metric: step, milliseconds since 1970, value


class MetricRow(NamedTuple):
    """The value of a metric in a store's list."""

    step: int
    time_ms: int
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
    latest: Mapping[str, MetricRow]  # metric to the value in the store's own list
    artifacts: str = ""  # the address of its folder; empty if only the server knows it


class Source(ABC):
    """An open store."""

    @abstractmethod
    def find_runs(self) -> Sequence[StoredRun]:
        """Return every run that was not deleted."""

    @abstractmethod
    def find_series(self, name: str, run_ids: Sequence[str]) -> Mapping[str, Sequence[Point]]:
        """Return the values of one metric by run, in any order. Runs without it may be absent."""

    @abstractmethod
    def read_artifact(self, run: StoredRun, name: str) -> dict[str, object] | None:
        """Return an artifact that is a JSON object; None if it was never sent, or cannot be reached."""


def sort_by_time(point: Point) -> tuple[int, float]:
    """Return a key that sorts a step's values as MLflow does: in one millisecond the largest is last, NaN as 0."""
    return point[1], 0.0 if math.isnan(point[2]) else point[2]


@dataclass
class Batch:
    """The chosen runs of a store, by id, and the metrics that the source's ``find_series`` read for them."""

    find: Callable[[str, Sequence[str]], Mapping[str, Sequence[Point]]]
    runs: dict[str, None] = field(default_factory=dict)
    _found: dict[str, dict[str, Sequence[Point]]] = field(default_factory=dict)

    def points(self, name: str, run_id: str) -> Sequence[Point]:
        """Return a metric's values of one run. Read them for every run of the batch that lacks them."""
        known = self._found.setdefault(name, {})
        if run_id not in known:
            missing = [run for run in self.runs if run not in known]
            found = self.find(name, missing)
            known |= {run: found.get(run, ()) for run in missing}
        return known[run_id]


class StoredMetrics(MutableMapping[str, Series]):
    """The metrics of one run, as :class:`~sparsebp_cli.run.History` holds them: name to step to (seconds, value)."""

    def __init__(self, batch: Batch, run: StoredRun, *, first_counts: bool) -> None:
        """Add the run to the batch without reading anything. If a step has several values, ``first_counts`` takes the
        first, as in SparseBP's event logs; otherwise the latest counts, as in the store's list."""
        batch.runs[run.run_id] = None
        self._batch, self._run, self._first_counts = batch, run, first_counts
        self._known: dict[str, Series] = {}
        self._names = dict.fromkeys(run.latest)

    def __getitem__(self, name: str) -> Series:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            points = self._batch.points(name, self._run.run_id)
            found = {step: (time_ms / 1000, value) for step, time_ms, value in points}
            if len(found) < len(points):  # some step has several values: choose one
                points = sorted(points, key=sort_by_time, reverse=self._first_counts)
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
