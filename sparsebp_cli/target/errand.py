"""One run that is carried out elsewhere, from its start to the last byte fetched."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

from filelock import FileLock

from sparsebp_cli.errors import RunBusyError, RunFailedError, SparseBPError, UnreachableError
from sparsebp_cli.run import RunFolder, read
from sparsebp_cli.target.ending import settle
from sparsebp_cli.target.engine import Engine, Phase, Sight
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.tracking import Follower

DEFAULT_GRACE_SECONDS = 30.0
UNREACHABLE, OVER = "unreachable", "over"


class Errand:
    """Holds the target's lock of one run, and does whatever is next each time it is asked to."""

    def __init__(self, run: RunFolder, engine: Engine, process: int) -> None:
        """Take the run.

        Args:
            run: The run.
            engine: Where it is carried out.
            process: Number of this process.

        Raises:
            RunBusyError: Another dispatcher has it.
        """
        self.run, self._engine = run, engine
        self._lock: FileLock = run.lock("target")
        self._saving = threading.Lock()
        self._before = Launch.load(run)
        self._asked: dict[str, float] = {}
        self._follower: Follower | None = None
        self._untracked = ""  # what the tracking store said; it outlives what the place said
        self.failures = 0
        if self._before is not None and self._before.sight not in {"", OVER}:  # another dispatcher began it and died
            self._launch = replace(self._before, watcher_pid=process, sight=UNREACHABLE)
        else:
            attempts = max((record["attempt"] for record, _ in read(run.path)), default=0)
            offset = run.log_file.stat().st_size if run.log_file.exists() else 0
            self._launch = Launch(attempts, process, sight=str(Phase.WAITING), log_offset=offset)
            run.cancel_file.unlink(missing_ok=True)
            run.request_file.unlink(missing_ok=True)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self._launch.sight == OVER

    @property
    def asked(self) -> bool:
        """Whether a user asked for something that was not answered yet."""
        return self._request() not in {"", *self._asked}

    def adopt(self) -> bool:
        """Look for a worker that is there already.

        Returns:
            Whether there is one.
        """
        handle = self._launch.handle or self._engine.find(self.run)
        if handle is None:
            return False
        self.take(handle)
        return True

    def conclude_ended(self) -> bool:
        """Conclude a worker that has ended by now.

        Returns:
            Whether it had, so that nothing is left to do and the run is held no more.
        """
        sight = self._engine.look(self.run, self._launch.handle)
        if sight.phase is Phase.OVER:
            self._conclude(sight)
        return self.over

    def take(self, handle: str) -> None:
        """Take a worker over, known by its handle."""
        self._save(handle=handle)
        self._follower = self._follower or Follower(self.run, warn=self._warn).start()

    def wait(self) -> None:
        """Say in the run's folder that its turn is still to come."""
        self._save(sight=str(Phase.WAITING))

    def drop(self, text: str = "", *, forget: bool = False) -> None:
        """Give up a run that was never started.

        Args:
            text: Why it failed; empty when it did not.
            forget: Whether it stays as it was before somebody tried.
        """
        if text or self.run.cancel_file.exists():
            settle(self.run, None, after_attempt=self._launch.after_attempt, text=text, failed=True)
        if forget and self._before is None:
            self.run.target_file.unlink(missing_ok=True)
        elif forget and self._before is not None:
            self._before.save(self.run)  # a worker of before may live: it is not over because its place is silent
        else:
            self._save(sight=OVER)
        self._launch = replace(self._launch, sight=OVER)
        self._lock.release()

    def turn(self) -> None:
        """Look once, and do what follows from it. A place that does not answer is noted, nothing else."""
        try:
            sight = self._engine.look(self.run, self._launch.handle)
            if sight.phase is Phase.OVER:
                self._conclude(sight)
                return
            self._save(sight=str(sight.phase), warning=self._untracked)
            if sight.phase is Phase.WORKING:
                self._engine.pull(self.run, self._launch.handle)
            self._answer_requests()
            self.failures = 0
        except UnreachableError as error:
            self.miss(str(error))
        except OSError as error:  # a full disk here: what is there stays there until there is room
            self.miss(f"what the run wrote cannot be kept here: {error}")
        except Exception as error:  # a defect in the care for one run must not end that for the others
            traceback.print_exc()
            self.miss(f"{type(error).__name__}: {error}; the traceback is in watcher.log")

    def miss(self, problem: str) -> None:
        """Note that nothing is known of the run.

        Args:
            problem: Why.
        """
        self.failures += 1
        self._save(sight=UNREACHABLE, warning=problem)

    def _conclude(self, sight: Sight) -> None:
        handle, text, refused = self._launch.handle, sight.text, ""
        try:
            if not sight.gone:
                self._engine.fetch(self.run, handle)
        except RunFailedError as error:  # it stays there, to be looked at
            text = refused = f"{error}; it is still there, as {handle}"
        if "kill" in self._asked and not self.run.cancel_file.exists():
            text = "killed by the user; the steps since the last checkpoint are repeated on resume"
        try:
            settle(
                self.run,
                sight.exit_code,
                after_attempt=self._launch.after_attempt,
                log_offset=self._launch.log_offset,
                text=text,
                failed=bool(refused),
            )
        except RunBusyError:  # on a shared disk, for a moment after its place saw it end
            return
        if not sight.gone and not refused:
            self._engine.release(self.run, handle)
        self._save(sight=OVER, exit_code=sight.exit_code, warning=refused or self._untracked)
        if self._follower is not None:
            self._save(warning=refused or self._follower.stop().advice(self.run.run_id))
        self._lock.release()

    def _answer_requests(self) -> None:
        request, now = self._request(), time.monotonic()
        if not request:
            return
        if request == "kill":
            if "kill" not in self._asked:
                self._signal(signal.SIGKILL)
        elif not self._asked:
            self._signal(signal.SIGTERM)
        self._asked.setdefault(request, now)
        if "cancel" in self._asked and now - self._asked["cancel"] > self._grace():
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        self._engine.signal(self.run, self._launch.handle, number)

    def _request(self) -> str:
        if self.run.cancel_file.exists():
            return "cancel"
        try:
            return self.run.request_file.read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _grace(self) -> float:
        try:
            return float(self.run.cancel_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return DEFAULT_GRACE_SECONDS

    def _warn(self, text: str) -> None:
        print(text, flush=True)
        self._untracked = text
        self._save(warning=text)

    def _save(self, **changes: Any) -> None:
        with self._saving:  # the follower warns from a thread of its own
            self._launch = replace(self._launch, **changes)
            self._launch.save(self.run)


def describe(error: SparseBPError) -> str:
    """Return why a run could not be started, as its journal keeps it."""
    return str(error) if isinstance(error, RunFailedError) else f"it could not be started: {error}"
