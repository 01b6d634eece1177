"""Define the contract of trackers, and find the packages that offer them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sparsebp_cli.entry_point import entry_points, find_source, find_tool, tell_home
from sparsebp_cli.errors import UsageError, did_you_mean

GROUP = "sparsebp.trackers"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")  # also part of a lock's name
STORE = "mlflow"
TOOLS = ("tensorboard", "trackio")  # were built in, and are now in sparsebp-tools


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets.

    Args:
        run_id: Id of the run, unchanged by a resume.
        name: Name of the recipe.
        seed: Seed of the training.
        experiment: The recipe's ``tracking.experiment``.
        created: Time at which the plan was made, in seconds since 1970.
        recipe: The resolved recipe as plain data, with passwords hidden.
        home: Folder in which a tracker without its own location may write.
    """

    run_id: str
    name: str
    seed: int
    experiment: str
    created: float
    recipe: Mapping[str, object]
    home: Path

    @property
    def title(self) -> str:
        """The run's name in a list. It is unique, and seeds of one recipe sort together."""
        return f"{self.name} seed {self.seed} {self.run_id}"


@dataclass(frozen=True)
class TrackedRecord:
    """One record of a run's event log.

    Args:
        id: Unique in the run, and the same each time the record is sent.
        kind: ``metrics``, ``note``, ``end``, or another kind of the event log. A resumed run continues after ``end``.
        time: Time at which it was written, in seconds since 1970.
        step: Step of the optimizer. A record without a step has the previous record's, 0 at first.
        metrics: New values of a ``metrics`` record by name; may be infinite or NaN. Values of a step that a later
            attempt repeats are left out, so each metric has one value a step.
        content: The whole record, as in the event log.
    """

    id: str
    kind: str
    time: float
    step: int
    metrics: Mapping[str, float]
    content: Mapping[str, object]


class TrackerSession(Protocol):
    """A session in which one process sends the records of one run."""

    place: str  # for people: where they can see the run

    def write(self, records: Sequence[TrackedRecord], /) -> None:
        """Store records before returning. Raise on any problem: the caller then closes the session, and opens a new one
        later.

        Every session gets the event log from its first record on, in the same order, in pieces of any size. So after a
        kill, or from a second process that sends the same run in turn, records may already be stored. Recognise these
        by ``id`` or position, and do not store them twice.

        Args:
            records: The next records.
        """

    def close(self) -> None:
        """Release the session's resources. A killed process never calls it."""


@dataclass(frozen=True)
class Tracker:
    """A tracker: a function that opens a session for a run.

    Args:
        open: Function that opens a session for a run; it may import the tracker's library.
        package: Module that it needs in addition to the package that offers it; None if none.
        install: What to install with pip to get the module.
    """

    open: Callable[[TrackedRun], TrackerSession]
    package: str | None = None
    install: str = ""

    def require(self, name: str) -> None:
        """Raise UsageError if the required module is not installed. ``name`` is the tracker's name in recipes."""
        if self.package is not None and find_spec(self.package) is None:
            raise UsageError(f"tracker {name!r} needs {self.package}: pip install '{self.install or self.package}'")


def list_trackers() -> list[str]:
    """Return the names of all installed trackers, sorted."""
    return sorted(set(entry_points(group=GROUP).names))


def find_tracker(name: str) -> Tracker:
    """Return a tracker by its name.

    Args:
        name: Name of the entry point, as in recipes.

    Returns:
        The tracker. Call :meth:`Tracker.require` to check that its library is installed.

    Raises:
        UsageError: No package offers it, several do, or its entry is broken.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP).select(name=name)}
    if not found and name in TOOLS:
        raise UsageError(f"tracker {name!r} is {tell_home('sparsebp-tools')}")
    if not found:
        names = list_trackers()
        more = " (MLflow records every run: leave it out)" if name == STORE else did_you_mean(name, names)
        raise UsageError(f"unknown tracker {name!r}, allowed: {', '.join(names) or 'none is installed'}{more}")
    if len(found) > 1:
        raise UsageError(f"tracker {name!r} is registered more than once, by {' and '.join(sorted(found))}")
    (entry,) = found.values()
    broken = f"tracker {name!r} of {find_source(entry)} is broken"
    if not NAME.fullmatch(name) or name == STORE:
        raise UsageError(f"{broken}: its name must be lower-case letters, digits, - and _, and not {STORE}")
    try:
        tracker = entry.load()
    except Exception as error:  # a plugin may fail in any way
        text = str(error).partition("\n")[0]
        raise UsageError(f"{broken}: {type(error).__name__}: {text}") from None
    if not isinstance(tracker, Tracker):
        raise UsageError(f"{broken}: {entry.value} is no Tracker")
    return tracker


def find_feeder() -> Any:
    """Return the module that sends event logs to trackers. Raise UsageError if its package is missing."""
    if (tool := find_tool("trackers")) is None:
        raise UsageError(f"the code that sends runs to trackers other than {STORE} is {tell_home('sparsebp-tools')}")
    return tool


def find_tracker_problems() -> Iterator[str]:
    """Yield one line for each installed tracker that cannot be imported. A missing library is not reported."""
    for name in list_trackers():
        try:
            find_tracker(name)
        except UsageError as error:
            yield str(error)
