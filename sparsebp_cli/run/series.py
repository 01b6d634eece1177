"""Store a metric over the steps of a run in arrays: 8 bytes a value and 16 a step. A dictionary needs about 250."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TypeAlias, TypeVar

Timed = tuple[float, float]  # seconds since 1970, value
Value = TypeVar("Value")
Steps: TypeAlias = "range | array[int]"  # a range as long as no step is missing


class _Points(Mapping[int, Value]):
    """A mapping from ascending steps to values. Views read arrays in order instead of searching for each step."""

    @property
    @abstractmethod
    def _steps(self) -> Steps: ...

    @abstractmethod
    def _iterate(self) -> Iterator[Value]: ...

    @abstractmethod
    def _at(self, place: int) -> Value: ...

    def _find(self, step: object) -> int | None:
        place = bisect_left(self._steps, step) if isinstance(step, int) else 0
        return place if place < len(self._steps) and self._steps[place] == step else None

    def __getitem__(self, step: int) -> Value:
        place = self._find(step)
        if place is None:
            raise KeyError(step)
        return self._at(place)

    def __contains__(self, step: object) -> bool:
        return self._find(step) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    @property
    def last_step(self) -> int:
        """The largest step; 0 without points."""
        return self._steps[-1] if self._steps else 0

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def values(self) -> ValuesView[Value]:
        return _Values(self)

    def items(self) -> ItemsView[int, Value]:
        return _Items(self)


class _Values(ValuesView[Value]):
    _mapping: _Points[Value]

    def __iter__(self) -> Iterator[Value]:
        return self._mapping._iterate()  # noqa: SLF001 - of this file


class _Items(ItemsView[int, Value]):
    _mapping: _Points[Value]

    def __iter__(self) -> Iterator[tuple[int, Value]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


def _insert(steps: Steps, place: int, step: int) -> Steps:
    """Return the steps with one more. An array is changed in place."""
    if isinstance(steps, range):
        if not steps or (place == len(steps) and step == steps[-1] + 1):
            return range(steps.start if steps else step, step + 1)
        steps = array("q", steps)
    steps.insert(place, step)
    return steps


class _Rows:
    """The steps and times that several metrics share because they were always logged together."""

    def __init__(self, num_series: int = 0) -> None:
        self.steps: Steps = range(0)
        self.times: array[float] = array("d")
        self.num_series = num_series  # number of series that share these rows

    def has(self, step: int) -> bool:
        """Return whether a step has a row."""
        if not self.steps or step > self.steps[-1]:
            return False
        return self.steps[bisect_left(self.steps, step)] == step

    def add(self, step: int, time: float) -> int:
        """Add a row for a new step, and return its index."""
        place = len(self.steps) if not self.steps or step > self.steps[-1] else bisect_left(self.steps, step)
        self.steps = _insert(self.steps, place, step)
        self.times.insert(place, time)
        return place

    def part(self, num_series: int) -> _Rows:
        """Return a copy for ``num_series`` of the series, which no longer share this object."""
        found = _Rows(num_series)
        found.steps = self.steps[:]
        found.times = self.times[:]
        self.num_series -= num_series
        return found


class Series(_Points[Timed]):
    """Map steps to time and value. The first value of a step counts, so points are only added."""

    def __init__(self) -> None:
        self._rows = _Rows(1)
        self._values: array[float] = array("d")

    @property
    def _steps(self) -> Steps:
        return self._rows.steps

    def without_times(self) -> Mapping[int, float]:
        """Return step to value, as a view without copying."""
        return _Plain(self._steps, self._values)

    def _at(self, place: int) -> Timed:
        return self._rows.times[place], self._values[place]

    def _iterate(self) -> Iterator[Timed]:
        return zip(self._rows.times, self._values, strict=True)


def add_together(metrics: dict[str, Series], step: int, time: float, values: Mapping[str, float]) -> dict[str, float]:
    """Add the values that were logged together at one step and time. Return the values of metrics that had none at this
    step. Metrics that are always logged together share one column of steps and times."""
    if unknown := [name for name in values if name not in metrics]:
        rows = _Rows(len(unknown))
        for name in unknown:
            metrics[name] = Series()
            metrics[name]._rows = rows  # noqa: SLF001 - of this file
    alike: dict[_Rows, list[str]] = {}
    for name in values:
        alike.setdefault(metrics[name]._rows, []).append(name)  # noqa: SLF001 - of this file
    known: set[str] = set()
    for rows, names in alike.items():
        if rows.has(step):
            known.update(names)
            continue
        own = rows if len(names) == rows.num_series else rows.part(len(names))
        place = own.add(step, time)
        for name in names:
            metrics[name]._rows = own  # noqa: SLF001 - of this file
            metrics[name]._values.insert(place, values[name])  # noqa: SLF001 - of this file
    return {name: value for name, value in values.items() if name not in known}


def cut(metrics: Mapping[str, Series], step: int) -> None:
    """Remove the points after a step."""
    for rows in {series._rows for series in metrics.values()}:  # noqa: SLF001 - of this file
        place = bisect_right(rows.steps, step)
        rows.steps, rows.times = rows.steps[:place], rows.times[:place]
    for series in metrics.values():
        del series._values[len(series) :]  # noqa: SLF001 - of this file


class _Plain(_Points[float]):
    def __init__(self, steps: Steps, values: array[float]) -> None:
        self._known_steps, self._values = steps, values

    @property
    def _steps(self) -> Steps:
        return self._known_steps

    def _at(self, place: int) -> float:
        return self._values[place]

    def _iterate(self) -> Iterator[float]:
        return iter(self._values)


def select(series: Mapping[int, float], is_wanted: Callable[[int, float], bool]) -> Mapping[int, float]:
    """Return the points for which ``is_wanted`` is true. ``series`` must have ascending steps."""
    steps: Steps = range(0)
    values: array[float] = array("d")
    for step, value in series.items():
        if is_wanted(step, value):
            steps = _insert(steps, len(values), step)
            values.append(value)
    return _Plain(steps, values)
