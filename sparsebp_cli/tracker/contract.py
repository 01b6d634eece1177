"""The contract of trackers, and the packages that offer them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from sparsebp_cli.entry_point import entry_points, find_source, tell_home
from sparsebp_cli.errors import UsageError, did_you_mean

GROUP = "sparsebp.trackers"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")  # also a part of the name of a lock
STORE = "mlflow"
TOOLS = ("tensorboard", "trackio")  # that were built in, and are in sparsebp-tools


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it, from its plan.

    Args:
        run_id: Id of the run, the same after each resume.
        name: Name of the recipe.
        seed: Seed of the training.
        experiment: What the recipe's ``tracking.experiment`` says.
        created: When the plan was made, in seconds since 1970.
        recipe: The resolved recipe as plain data, with passwords hidden.
        home: Folder under which a tracker without a place of its own may write.
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
        """The run's name in a list: seeds of one recipe stand together, and no two runs have the same."""
        return f"{self.name} seed {self.seed} {self.run_id}"


@dataclass(frozen=True)
class TrackedRecord:
    """A record of the journal.

    Args:
        id: The same whenever the record is given, and of no other record of the run.
        kind: ``metrics``, ``note``, ``end``, and the others of the journal. After ``end`` a resumed run goes on.
        time: When it was written, in seconds since 1970.
        step: Step of the optimizer; of a record without one that of the record before, 0 at first.
        metrics: New values of a ``metrics`` record by name; may be infinite or not a number. A value of a step that an
            attempt repeats is not new and left out, so each metric has one value a step.
        content: The whole record, as the journal has it.
    """

    id: str
    kind: str
    time: float
    step: int
    metrics: Mapping[str, float]
    content: Mapping[str, object]


class TrackerSession(Protocol):
    """One process that sends one run."""

    place: str  # where the run can be seen, for people

    def write(self, records: Sequence[TrackedRecord], /) -> None:
        """Store some records, before this returns. Raise whatever is wrong: a session that raised is closed, and the
        next one begins anew.

        Every session is given the journal from its first record on, in the same order, in pieces of any size. So after
        a kill, or from a second process that sends the same run in turn, records come that are stored already: they
        must be known by their ``id``, or by their place in the order, and not be stored twice.

        Args:
            records: The next records.
        """

    def close(self) -> None:
        """Release what the session holds. A killed process never calls it."""


@dataclass(frozen=True)
class Tracker:
    """A tracker.

    Args:
        open: Function that begins a session for a run; it may import the tracker's library.
        package: The module that it needs beyond the package that offers it; None: none.
        install: What pip installs to have that module.
    """

    open: Callable[[TrackedRun], TrackerSession]
    package: str | None = None
    install: str = ""

    def require(self, name: str) -> None:
        """Raise UsageError if the module is not installed that the tracker needs, called ``name`` in recipes."""
        if self.package is not None and find_spec(self.package) is None:
            raise UsageError(f"tracker {name!r} needs {self.package}: pip install '{self.install or self.package}'")


def list_trackers() -> list[str]:
    """Return the names of all installed trackers, sorted."""
    return sorted(set(entry_points(group=GROUP).names))


def find_tracker(name: str) -> Tracker:
    """Return a tracker by its name.

    Args:
        name: Name of the entry point, by which recipes call it.

    Returns:
        The tracker. Whether its library is installed :meth:`Tracker.require` says.

    Raises:
        UsageError: No package offers it, several do, or its entry is broken.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP).select(name=name)}
    if not found and name in TOOLS:
        raise UsageError(f"tracker {name!r} is {tell_home('sparsebp-tools')}")
    if not found:
        names = list_trackers()
        more = " (MLflow has every run without being named)" if name == STORE else did_you_mean(name, names)
        raise UsageError(f"unknown tracker {name!r}, allowed: {', '.join(names) or 'none is installed'}{more}")
    if len(found) > 1:
        raise UsageError(f"tracker {name!r} is offered more than once, by {' and '.join(sorted(found))}")
    (entry,) = found.values()
    broken = f"tracker {name!r} of {find_source(entry)} is broken"
    if not NAME.fullmatch(name) or name == STORE:
        raise UsageError(f"{broken}: its name must be small letters, digits, - and _, and not {STORE}")
    try:
        tracker = entry.load()
    except Exception as error:  # a plugin may fail in any way
        text = str(error).partition("\n")[0]
        raise UsageError(f"{broken}: {type(error).__name__}: {text}") from None
    if not isinstance(tracker, Tracker):
        raise UsageError(f"{broken}: {entry.value} is no Tracker")
    return tracker


def find_tracker_problems() -> Iterator[str]:
    """Yield a line on each installed tracker that is broken. One whose library is not installed is not."""
    for name in list_trackers():
        try:
            find_tracker(name)
        except UsageError as error:
            yield str(error)
