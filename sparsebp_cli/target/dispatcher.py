"""The remote runner: supervise runs on remote targets, in a process that outlives the client.

    python -m sparsebp_cli.target.dispatcher [--max-parallel N] [--adopt] RUN_FOLDER...

All its state is in the runs' folders and at the target. After kill -9 the workers continue. The next remote runner
finds them by handle or by label, and fetches what they wrote in the meantime.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from sparsebp_cli.errors import RunBusyError, RunFailedError, SparseBPError, UnreachableError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, State, durable, keep_private
from sparsebp_cli.target.engine import TargetEngine
from sparsebp_cli.target.launch import detach, leave_client, open_runs, report_start
from sparsebp_cli.target.remote_run import RemoteRun, describe

SLICE_SECONDS = 0.1
GROWTH = 1.15  # factor between two pauses of polling
LONGEST_PAUSE = 60.0  # between two attempts to reach a target that does not answer
MOST_DOUBLINGS = 30  # of that pause: a connection may be down for days, and 2.0**1024 overflows


class Dispatcher:
    """Follows several runs on one engine, and starts the waiting ones."""

    def __init__(
        self,
        runs: Sequence[RunFolder],
        engine: TargetEngine,
        *,
        max_parallel: int = 1,
        adopt_only: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Lock the runs. Raise ``RunBusyError`` if another remote runner has locked one. At most ``max_parallel`` runs
        work at once. With ``adopt_only``, follow existing workers and start none."""
        self._engine, self._max_parallel, self._adopt_only, self._sleep = engine, max_parallel, adopt_only, sleep
        self._waiting: list[RemoteRun] = []
        self._followed: list[RemoteRun] = []
        self._pause = engine.fastest_seconds
        self._start_again = 0.0
        self._stopping = False  # stopping one run stops all
        for run in runs:
            self._waiting.append(RemoteRun(run, engine, os.getpid()))

    def begin(self) -> None:
        """Follow the runs that have a worker, then start the first of the others, or as many as may work at once. If
        the first cannot be started, release every run and raise the error."""
        for remote in self._waiting:
            remote.mark_waiting()
        try:
            # Iterate over a copy: adopting removes runs from the list.
            for remote in [*self._waiting]:
                if remote.adopt_worker():
                    self._adopt(remote)
        except UnreachableError as error:
            # No start was tried: earlier starts keep their record, and runs without one are recorded as failed.
            if not self._adopt_only:
                while self._waiting:
                    self._waiting.pop().withdraw(describe(error))
                raise
            for remote in self._waiting:
                remote.mark_unreachable(str(error))
            return
        if self._adopt_only:
            self._abandon_waiting()
            return
        try:
            self._start_or_adopt()
        except UnreachableError as error:
            # The worker may have started anyway: each poll looks for it.
            self._waiting[0].mark_unreachable(str(error))
        except SparseBPError as error:
            self._waiting.pop(0).withdraw(describe(error))
            self._abandon_waiting()
            raise

    def run_to_end(self) -> None:
        """Poll until every run is over."""
        while self._followed or self._waiting:
            self._pause_between_polls()
            self.poll()

    def poll(self) -> None:
        """Poll every run once, and start the next one if fewer than ``max_parallel`` work."""
        for remote in [*self._followed]:
            if not remote.over:  # the poll right after its start may have found its end, and released it there
                remote.poll()
            # After the poll, a stop that arrived during it has already been carried out and is no longer new.
            if not self._stopping and self._is_stop(remote):
                self._stopping = True
                self._abandon_waiting()
                for other in self._followed:
                    durable.write_new(other.run.request_file, "stop")  # never overwrites a kill
            if remote.over:
                self._followed.remove(remote)
        for remote in [*self._waiting]:
            if remote.run.cancel_file.exists():
                self._waiting.remove(remote)
                remote.abandon()
        has_room = self._adopt_only or self._engine.has_queue or len(self._followed) < self._max_parallel
        if self._waiting and has_room and time.monotonic() >= self._start_again:
            self._try_start()

    def _try_start(self) -> None:
        first = self._waiting[0]
        try:
            if first.adopt_worker():
                self._follow(first)
            elif self._adopt_only:
                self._waiting.remove(first)
                first.abandon()
            else:
                self._start_or_adopt()
        except UnreachableError as error:
            self._start_again = time.monotonic() + _pause_after(first.failures + 1)
            first.mark_unreachable(str(error))
        except SparseBPError as error:
            self._waiting.remove(first)
            first.abandon(describe(error))

    def _start_or_adopt(self) -> None:
        """Start the next runs. On an error, look for the worker once more before raising: the request may have
        succeeded although its answer was an error, was lost, or could not be read."""
        first = self._waiting[0]
        try:
            self._start_next()
        except (UnreachableError, RunBusyError):
            raise
        except Exception as error:
            if first not in self._waiting:  # it was started, but the next one was not
                first = self._waiting[0]
            if first.adopt_worker():
                self._follow(first)
            elif isinstance(error, SparseBPError):
                raise
            else:
                traceback.print_exc()
                raise RunFailedError(f"{type(error).__name__}: {error}") from error

    def _start_next(self) -> None:
        while self._waiting and (self._engine.has_queue or len(self._followed) < self._max_parallel):
            # An engine with a queue takes all runs as one submission, other engines one run a call.
            chosen = self._waiting if self._engine.has_queue else self._waiting[:1]
            handles = self._engine.start([remote.run for remote in chosen], self._max_parallel)
            for remote, handle in zip([*chosen], handles, strict=True):
                remote.follow(handle)
                self._follow(remote)
                remote.poll()

    def _adopt(self, remote: RemoteRun) -> None:
        """Follow an existing worker. If it ended while no remote runner ran, finish it and queue the run to resume."""
        if self._adopt_only or not remote.finish_if_ended():
            self._follow(remote)
            return
        place = self._waiting.index(remote)
        del self._waiting[place]
        if remote.run.state() in {State.INTERRUPTED, State.FAILED}:
            again = RemoteRun(remote.run, self._engine, os.getpid())
            again.mark_waiting()
            self._waiting.insert(place, again)

    def _follow(self, remote: RemoteRun) -> None:
        self._waiting.remove(remote)
        self._followed.append(remote)

    def _abandon_waiting(self) -> None:
        """Release every run that was not started."""
        while self._waiting:
            self._waiting.pop().abandon()

    def _is_stop(self, remote: RemoteRun) -> bool:
        return remote.run.request_file.exists() and not remote.run.cancel_file.exists()

    def _pause_between_polls(self) -> None:
        engine = self._engine
        worst = max((remote.failures for remote in [*self._followed, *self._waiting]), default=0)
        pause = _pause_after(worst) if worst else self._pause
        self._pause = min(self._pause * GROWTH, engine.slowest_seconds)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            if any(remote.has_new_request for remote in self._followed):
                return
            self._sleep(min(SLICE_SECONDS, pause))


def _pause_after(failures: int) -> float:
    return min(2.0 ** min(failures, MOST_DOUBLINGS), LONGEST_PAUSE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Detach from the client's process tree, then dispatch."""
    from sparsebp_cli.target import make_target
    from sparsebp_cli.target.remote import RemoteTarget

    parser = argparse.ArgumentParser(prog="python -m sparsebp_cli.target.dispatcher")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--max-parallel", type=int, default=1)
    parser.add_argument("--adopt", action="store_true")
    parsed = parser.parse_args(arguments)
    keep_private()
    detach()
    try:
        runs = open_runs(parsed.runs)
        target = make_target(Plan.load(runs[0].plan_file).recipe.target)
        if not isinstance(target, RemoteTarget):
            raise UsageError(f"{type(target).__name__} is not a remote target (a subclass of RemoteTarget)")
        dispatcher = Dispatcher(runs, target.engine, max_parallel=parsed.max_parallel, adopt_only=parsed.adopt)
        dispatcher.begin()
    except SparseBPError as error:
        report_start(error)
        raise SystemExit(1) from None
    except OSError as error:
        report_start(RunFailedError(f"the run could not be started: {error}"))
        raise SystemExit(1) from None
    report_start()
    leave_client(runs[0])
    dispatcher.run_to_end()


if __name__ == "__main__":
    main()
