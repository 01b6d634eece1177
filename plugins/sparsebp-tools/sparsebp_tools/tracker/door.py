"""Send the event log of a run to the configured trackers beside MLflow, during the run or later.

A session always begins at the start of the event log. So nothing about earlier sessions is stored, and after any
failure, even a kill during a write, the next session determines itself what the tracker has.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock

from sparsebp_cli.errors import SparseBPError, TrackingError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, home, read
from sparsebp_cli.run.budget import size_of
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.record_type import Record
from sparsebp_cli.run.series import Series, add_together
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracker import TrackedRecord, TrackedRun, TrackerSession, find_tracker
from sparsebp_cli.tracking.store import one_line

BATCH = 1000  # records
LOCK_SECONDS = 60.0
LONGEST_PAUSE = 300.0
NICENESS = 10  # training takes precedence on the CPU


class Door:
    """Send the new part of one run's event log to one tracker at each :meth:`send`."""

    run: RunFolder
    name: str
    points_sent: int
    place: str

    def __init__(self, run: RunFolder, name: str, *, batch: int = BATCH) -> None:
        """Prepare without reading or opening anything; ``batch`` is the largest number of records in a write."""
        self.run, self.name, self._batch = run, name, batch
        self.points_sent = 0  # values that the tracker accepted, including known ones
        self.place = ""  # where the user can see the run; empty before a session
        self._session: TrackerSession | None = None
        # State of the session: bytes of the event log that were sent, the step reached, and values by step.
        self._offset, self._step = 0, 0
        self._known: dict[str, Series] = {}

    def send(self) -> None:
        """Send new records. Raises ``TrackingError`` if the tracker fails; the next call begins a new session."""
        if self.run.is_gone():  # its lock would create the folder again
            raise TrackingError(f"run {self.run.run_id}: {self.run.describe_move()}")
        is_first = self._session is None
        try:
            # The run's local runner and `sparsebp sync` may send at the same time.
            with FileLock(self.run.path / f"tracker-{self.name}.lock", timeout=LOCK_SECONDS):
                try:
                    self._send()
                except Exception:
                    if is_first:
                        raise
                    self._send()  # the data of an older session may have been removed meanwhile
        except SparseBPError as error:
            raise TrackingError(str(error)) from error
        except (Exception, SystemExit) as error:  # a plug-in may fail in any way
            raise TrackingError(f"tracker {self.name!r} failed: {one_line(error)}") from error

    def close(self) -> None:
        """End the session, if there is one, and ignore its errors."""
        session, self._session = self._session, None
        with suppress(Exception, SystemExit):
            if session is not None:
                session.close()

    def _send(self) -> None:
        try:
            session = self._find_session()
            while batch := list(islice(self._read(), self._batch)):
                session.write(batch)
                self.points_sent += sum(len(record.metrics) for record in batch)
        except BaseException:
            self.close()
            raise

    def _find_session(self) -> TrackerSession:
        size = size_of(self.run.path / JOURNAL)
        if self._session is not None and size < self._offset:  # the event log was replaced
            self.close()
        if self._session is None:
            tracker = find_tracker(self.name)
            tracker.require(self.name)
            self._session = tracker.open(describe_run(Plan.load(self.run.plan_file)))
            self.place = mask(str(self._session.place))
            self._offset, self._step, self._known = 0, 0, {}
        return self._session

    def _read(self) -> Iterator[TrackedRecord]:
        for record, end in read(self.run.path, self._offset):
            self._offset = end
            yield self._make_record(record, end)

    def _make_record(self, record: Record, end: int) -> TrackedRecord:
        metrics: Mapping[str, float] = {}
        content: dict[str, Any] = dict(record)
        step = content.get("step")
        self._step = step if isinstance(step, int) else self._step
        if record["kind"] == "metrics":
            # The first value of a step counts, as in every reader of an event log. See decision 2.
            metrics = add_together(self._known, record["step"], record["time"], record["values"])
        line = json.dumps([end, content], sort_keys=True, default=str)
        if isinstance(content.get("text"), str):
            content["text"] = mask(content["text"])
        identity = hashlib.sha256(line.encode()).hexdigest()[:16]
        return TrackedRecord(identity, record["kind"], record["time"], self._step, metrics, content)


def describe_run(plan: Plan) -> TrackedRun:
    """Return the description of a run that a tracker gets."""
    recipe = plan.recipe
    return TrackedRun(
        run_id=plan.run_id,
        name=recipe.name,
        seed=recipe.training.seed,
        experiment=recipe.tracking.experiment,
        created=plan.created,
        recipe=_hide(recipe.model_dump(mode="json")),
        home=Path(home()),
    )


def _hide(value: Any) -> Any:
    """Return plain data with the passwords of its texts hidden."""
    match value:
        case str():
            return mask(value)
        case list():
            return [_hide(one) for one in value]
        case dict():
            return {key: _hide(one) for key, one in value.items()}
    return value


class DoorThread:
    """A thread that sends an event log to one tracker every few seconds, and the rest when it is asked to end."""

    problem: str

    def __init__(self, run: RunFolder, name: str, every: float, warn: Callable[[str], None]) -> None:
        """Prepare; ``warn`` gets one line, once, when the tracker fails."""
        self.problem = ""  # of the last attempt; empty if the tracker has everything
        self.name = name
        self._door, self._every, self._warn = Door(run, name), every, warn
        self._is_warned = False
        self._over = threading.Event()
        # A daemon, so that a hanging tracker keeps no process alive; the event log has what the tracker lacks.
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask_to_end(self) -> None:
        """Request that it sends the rest and ends."""
        self._over.set()

    def wait(self, deadline: float, within: float) -> str:
        """Wait for its end until ``deadline``, a moment of ``time.monotonic``; it was asked to end ``within`` seconds
        before. Return what the tracker lacks and the command that sends it; empty if it lacks nothing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.problem = f"tracker {self.name!r} took longer than {within:g} s"
        return self.advice()

    def advice(self) -> str:
        """Return one line on what the tracker lacks and the command that sends it; empty if it lacks nothing."""
        if not self.problem:
            return ""
        send = f"`sparsebp sync {self._door.run.run_id} --to {self.name}` sends it later"
        return f"{self.problem}; the event log keeps everything, {send}"

    def _follow(self) -> None:
        if sys.platform == "linux":
            # On Linux each thread has its own priority; elsewhere this would change the training's as well.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pause = self._every
        while not self._over.wait(pause):
            pause = self._every if self._send() else min(2 * pause, LONGEST_PAUSE)
        self._send()
        self._door.close()

    def _send(self) -> bool:
        try:
            self._door.send()
            self.problem = ""
        except TrackingError as error:
            self.problem = str(error)
        except Exception as error:  # a defect in tracking must not end the run
            self.problem = f"tracking: {type(error).__name__}: {error}"
        if self.problem and not self._is_warned:
            self._is_warned = True
            self._warn(self.advice())
        return not self.problem


def send_to(run: RunFolder, name: str) -> tuple[Door, str]:
    """Send a run's whole event log to a tracker; return the door, and a line on why the tracker lacks something, empty
    if it has everything. Repeating it changes nothing."""
    door = Door(run, name)
    try:
        door.send()
    except TrackingError as error:
        return door, str(error)
    finally:
        door.close()
    return door, ""
