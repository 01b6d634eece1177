"""Send a running run's event log to MLflow, in threads of the supervising process. Never raise."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Self

from sparsebp_cli.errors import SparseBPError, TrackingError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracking.flush import Flusher, SyncResult
from sparsebp_cli.tracking.store import is_sqlite

LONGEST_PAUSE = 300.0
NICENESS = 10  # training has priority on the CPU
FILE_PATIENCE = 4  # a database file cannot hang like a server, and a busy machine needs long to create one


class Follower:
    """A thread that sends every few seconds, and less often while the store is unreachable. Another thread sends the
    rest.

        with Follower(run, warn=note) as follower:
            process.wait()
        follower.result   # of the last attempt

    Start the worker before the follower: where niceness belongs to the process, children inherit it.
    """

    run: RunFolder
    every: float
    within: float
    warn: Callable[[str], None] | None
    result: SyncResult

    def __init__(
        self, run: RunFolder, *, every: float = 10.0, within: float = 30.0, warn: Callable[[str], None] | None = None
    ) -> None:
        """Prepare without opening or starting anything; a wrong store does not raise. It sends every ``every`` seconds.
        The last send takes at most ``within`` seconds, or four times as long to a database file. If the store cannot be
        used, ``warn`` is called once with one line, from the follower's thread."""
        self.run, self.every, self.within, self.warn = run, every, within, warn
        self.result = SyncResult()
        self.warnings: list[str] = []
        self._flusher: Flusher | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> SyncResult:
        """Send the rest after the run is over, and return the result. If this exceeds ``within``, ``problem`` says so,
        and ``sparsebp sync`` can send the rest from the event log."""
        self._over.set()
        last = threading.Thread(target=self._send_rest, name="tracking", daemon=True)  # has the caller's niceness
        last.start()
        limit = self.within
        last.join(limit)
        if last.is_alive() and self._flusher and is_sqlite(self._flusher.uri):
            limit *= FILE_PATIENCE
            last.join(limit - self.within)
        if last.is_alive():
            sent = self._flusher.points_sent if self._flusher else 0
            return SyncResult(sent, False, f"the tracking store took longer than {limit:g} s", self.result.uri)
        return self.result

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def flush(self) -> SyncResult:
        """Send once, in the caller's thread. ``points_sent`` of the result counts from the start. Never raise."""
        try:
            self._flusher = self._flusher or Flusher(self.run)
            done = self._flusher.flush()
            self.result = SyncResult(self._flusher.points_sent, True, "", done.uri, done.mlflow_run_id)
        except SparseBPError as error:
            self._failed(str(error), refused=self._flusher is None and isinstance(error, TrackingError))
        except Exception as error:  # a bug in tracking must not end the run
            self._failed(f"tracking: {type(error).__name__}: {error}")
        return self.result

    def _failed(self, problem: str, *, refused: bool = False) -> None:
        sent = self._flusher.points_sent if self._flusher else 0
        self.result = SyncResult(sent, False, problem, self.result.uri, self.result.mlflow_run_id, is_refused=refused)
        if not self.warnings:
            self.warnings.append(self.result.advice(self.run.run_id))
            if self.warn is not None:
                self.warn(self.warnings[0])

    def _follow(self) -> None:
        if sys.platform == "linux":
            # On Linux each thread has its own priority; elsewhere this would change the training's too.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pause = self.every
        while not self._over.wait(pause):
            pause = self.every if self.flush().complete else min(2 * pause, LONGEST_PAUSE)

    def _send_rest(self) -> None:
        self._thread.join()
        self.flush()
