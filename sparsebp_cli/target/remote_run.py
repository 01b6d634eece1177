"""Supervise one run on a remote target, from its start until everything is fetched."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any

from filelock import FileLock

from sparsebp_cli.errors import RunBusyError, RunFailedError, SparseBPError, UnreachableError
from sparsebp_cli.run import RunFolder, read
from sparsebp_cli.run.budget import LARGEST_SMALL, read_bounded, size_of
from sparsebp_cli.target.end_record import write_end_record
from sparsebp_cli.target.engine import Phase, TargetEngine, WorkerStatus
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.tracking import Follower

DEFAULT_GRACE_SECONDS = 30.0
UNREACHABLE, OVER = "unreachable", "over"


class RemoteRun:
    """Holds the target's lock of one run. Each :meth:`poll` reads the worker's status and takes the next step."""

    run: RunFolder
    failures: int

    def __init__(self, run: RunFolder, engine: TargetEngine, process: int) -> None:
        """Lock the run for ``process``, this process's id. Raise ``RunBusyError`` if another runner has the lock."""
        self.run, self._engine = run, engine
        self._lock: FileLock = run.lock("target")
        self._save_lock = threading.Lock()
        self._before = Launch.load(run)
        self._obeyed: dict[str, float] = {}
        self._polled_with = ""  # the request that the last poll knew
        self._follower: Follower | None = None
        self._tracking_warning = ""  # kept when a warning about the target is cleared
        self.failures = 0
        if self._before is not None and self._before.sight not in {"", OVER}:  # another runner started it and died
            self._launch = replace(self._before, watcher_pid=process, sight=UNREACHABLE)
        else:
            attempts = max((record["attempt"] for record, _ in read(run.path)), default=0)
            offset = size_of(run.log_file)
            self._launch = Launch(attempts, process, sight=str(Phase.WAITING), log_offset=offset)
            # Requests made before this start do not apply to it.
            run.cancel_file.unlink(missing_ok=True)
            run.request_file.unlink(missing_ok=True)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self._launch.sight == OVER

    @property
    def has_new_request(self) -> bool:
        """Whether the user made a request (stop, kill, cancel) since the last poll began."""
        return self._request() not in {"", self._polled_with}

    def adopt_worker(self) -> bool:
        """Follow the run's worker if the engine already has one. Return whether it has."""
        known = self._launch.handle
        # Never follow a text that is not a handle: ask the engine for the run instead. See decision 9.
        handle = known if self._engine.is_handle(known) else self._engine.find(self.run)
        if handle is None:
            return False
        self.follow(handle)
        return True

    def finish_if_ended(self) -> bool:
        """Finish and release the run if its worker has ended. Return whether it had."""
        status = self._engine.status(self.run, self._launch.handle)
        if status.phase is Phase.OVER:
            self._finish(status)
        return self.over

    def follow(self, handle: str) -> None:
        """Save the handle, follow its worker, and send the event log to the tracking store."""
        self._save(handle=handle)
        self._follower = self._follower or Follower(self.run, warn=self._warn).start()

    def mark_waiting(self) -> None:
        """Record in the run's folder that the run waits for its start."""
        self._save(sight=str(Phase.WAITING))

    def withdraw(self, text: str) -> None:
        """Release a run that was not started because the engine refused it or did not answer. Restore its folder to the
        state before this process locked it. If it was never started before, record a failure with ``text`` as the
        reason."""
        if self._before is not None:
            # An earlier worker may be alive: an unreachable target does not mean that the run is over.
            self._before.save(self.run)
        elif self._launch.after_attempt:
            self.run.target_file.unlink(missing_ok=True)
        else:
            write_end_record(self.run, None, after_attempt=0, text=text, failed=True)
            self._save(sight=OVER)
        self._launch = replace(self._launch, sight=OVER)
        self._lock.release()

    def abandon(self, text: str = "") -> None:
        """Release a run that was never started. A non-empty text is the reason why it failed."""
        if text or self.run.cancel_file.exists():
            write_end_record(self.run, None, after_attempt=self._launch.after_attempt, text=text, failed=True)
        self._save(sight=OVER)
        self._lock.release()

    def poll(self) -> None:
        """Read the worker's status once and act on it. Record a target that does not answer as unreachable."""
        self._polled_with = self._request()
        try:
            status = self._engine.status(self.run, self._launch.handle)
            if status.phase is Phase.OVER:
                self._finish(status)
                return
            self._save(sight=str(status.phase), warning=self._tracking_warning)
            if status.phase is Phase.WORKING:
                self._engine.pull(self.run, self._launch.handle)
            self._obey_requests()
            self.failures = 0
        except UnreachableError as error:
            self.mark_unreachable(str(error))
        except OSError as error:  # such as a full local disk: the target keeps its files until there is space
            self.mark_unreachable(f"the run's results cannot be stored here: {error}")
        except Exception as error:  # a bug met with one run must not stop the supervision of others
            traceback.print_exc()
            self.mark_unreachable(f"{type(error).__name__}: {error}; the traceback is in watcher.log")

    def mark_unreachable(self, problem: str) -> None:
        """Record that the worker's status is unknown, with the problem as the run's warning."""
        self.failures += 1
        try:
            self._save(sight=UNREACHABLE, warning=problem)
        except OSError as error:  # no space for this either: supervision of the other runs continues
            print(f"{self.run.run_id}: {problem} ({error})", flush=True)
            if not self.run.path.exists():  # deleted by the user: there is no place to fetch to
                self._launch = replace(self._launch, sight=OVER)
                if self._follower is not None:
                    self._follower.stop()
                self._lock.release()

    def _finish(self, status: WorkerStatus) -> None:
        handle, text, refused = self._launch.handle, status.text, ""
        try:
            if not status.gone:
                self._engine.fetch(self.run, handle)
        except RunFailedError as error:  # dangerous content: leave it there for the user to inspect
            text = refused = f"{error}; the results are still on the target, as {handle}"
        if "kill" in self._obeyed and not self.run.cancel_file.exists():
            text = "killed by the user; the steps since the last checkpoint are repeated on resume"
        try:
            written = write_end_record(
                self.run,
                status.exit_code,
                after_attempt=self._launch.after_attempt,
                log_offset=self._launch.log_offset,
                text=text,
                failed=bool(refused),
            )
        except RunBusyError:  # on a shared disk the worker's lock may briefly outlive its process
            return
        # Release last: a process that dies earlier can repeat everything.
        if not status.gone and not refused:
            self._engine.release(self.run, handle)
        said = refused or ("" if written else status.text)  # otherwise the end record says it
        # Before the last upload, so that readers see the end while a slow store still receives data.
        self._save(sight=OVER, exit_code=status.exit_code, warning=said or self._tracking_warning)
        if self._follower is not None:
            sent = self._follower.stop().advice(self.run.run_id)
            self._save(warning=said or sent)
        self._lock.release()

    def _obey_requests(self) -> None:
        request, now = self._request(), time.monotonic()
        if not request:
            return
        if request == "kill":
            if "kill" not in self._obeyed:
                self._signal(signal.SIGKILL)
        elif not self._obeyed:
            self._signal(signal.SIGTERM)
        self._obeyed.setdefault(request, now)
        if "cancel" in self._obeyed and now - self._obeyed["cancel"] > self._grace():
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        self._engine.signal(self.run, self._launch.handle, number)

    def _request(self) -> str:
        if self.run.cancel_file.exists():
            return "cancel"
        try:
            return read_bounded(self.run.request_file, LARGEST_SMALL).decode().strip()
        except (OSError, ValueError):
            return ""

    def _grace(self) -> float:
        try:
            return float(read_bounded(self.run.cancel_file, LARGEST_SMALL))
        except (OSError, ValueError):
            return DEFAULT_GRACE_SECONDS

    def _warn(self, text: str) -> None:
        print(text, flush=True)
        self._tracking_warning = text
        with suppress(OSError):  # disk full or folder deleted: the text was printed
            self._save(warning=text)

    def _save(self, **changes: Any) -> None:
        with self._save_lock:  # the follower warns from its own thread
            self._launch = replace(self._launch, **changes)
            self._launch.save(self.run)


def describe(error: SparseBPError) -> str:
    """Return why a run could not be started, as its event log records it."""
    return str(error) if isinstance(error, RunFailedError) else f"it could not be started: {error}"
