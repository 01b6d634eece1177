"""The local runner: supervise the workers of one or more runs on this machine, in a process that outlives the client.

    python -m sparsebp_cli.target.watcher [--max-parallel N] RUN_FOLDER...

It holds the target's lock of each run, starts the worker, and sends the event log to the tracking store while the
worker is alive. It writes the end record if the worker could not. After kill -9 the worker continues. The run's state
stays right, because it is derived from locks and event log.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock

from sparsebp_cli.errors import RunBusyError, SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, interpreter, keep_private, read
from sparsebp_cli.run.budget import open_to_append
from sparsebp_cli.target.contract import Target
from sparsebp_cli.target.end_record import write_end_record
from sparsebp_cli.target.launch import Launch, detach, leave_client, open_runs, report_start
from sparsebp_cli.target.local import LocalTarget, share_gpus
from sparsebp_cli.tracking import Follower


class LocalRun:
    """One supervised run."""

    run: RunFolder

    def __init__(self, run: RunFolder, target: Target) -> None:
        """Lock the run. Raise ``RunBusyError`` if another process works on it."""
        self.run, self._target = run, target
        self._lock: FileLock = run.lock("target")
        if run.is_locked("worker"):  # a worker may outlive its local runner
            raise RunBusyError(f"another process is already working on run {run.run_id}")
        attempts = max((record["attempt"] for record, _ in read(run.path)), default=0)
        self._launch = Launch(after_attempt=attempts, watcher_pid=os.getpid())
        self._launch.save(run)
        run.cancel_file.unlink(missing_ok=True)
        self._save_lock = threading.Lock()
        self._log_offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def start(self, signals: Sequence[int], environment: Mapping[str, str]) -> None:
        """Start the worker with extra environment variables. Send it the signals that arrived before it existed."""
        with open_to_append(self.run.log_file) as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                self._target.command(self.run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Unbuffered, because its log is followed while it runs.
                env=interpreter.worker_environment({"PYTHONUNBUFFERED": "1", **self._named(), **environment}),
            )
        self._save(worker_pid=self._process.pid)
        # Iterate over a copy, because the handler adds to it. Do not send again what the handler forwarded meanwhile.
        for number in [*signals]:
            if number not in self._signals:
                self.signal(number)

    def _named(self) -> dict[str, str]:
        """Return the variables that the recipe sets; none for an unreadable plan: the worker reports why."""
        with suppress(SparseBPError):
            return dict(Plan.load(self.run.plan_file).recipe.target.options.get("env", {}))
        return {}

    def signal(self, number: int) -> None:
        """Forward a signal to the worker."""
        if self._process is not None:
            self._signals.append(number)
            self._process.send_signal(number)

    def finish(self) -> None:
        """Wait for the worker, write the end record if the worker could not, and send the last metrics."""
        follower = Follower(self.run, warn=self._warn).start()
        exit_code = None
        if self._process is not None:
            if self.run.cancel_file.exists():  # cancelled after the check before the start
                self._process.send_signal(signal.SIGTERM)
            exit_code = self._process.wait()
        try:
            self._write_end(exit_code)
        except (SparseBPError, OSError) as error:
            with suppress(OSError):  # this output may go to a file on the same full disk
                print(f"the end of run {self.run.run_id} could not be recorded: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk takes no warning either
            self._save(warning=follower.stop().advice(self.run.run_id))
        # Release after the last metrics are sent: a free lock means that the job is settled.
        self._lock.release()

    def _write_end(self, exit_code: int | None) -> None:
        killed = exit_code == -signal.SIGKILL and self._signals
        write_end_record(
            self.run,
            exit_code,
            after_attempt=self._launch.after_attempt,
            log_offset=self._log_offset,
            text="killed by the user; the steps since the last checkpoint are repeated on resume" if killed else "",
        )
        self._save(exit_code=exit_code)

    def _warn(self, text: str) -> None:
        with suppress(OSError):  # fails on a full disk or in a folder that was moved
            print(text, file=sys.stderr, flush=True)
            self._save(warning=text)

    def _save(self, **changes: Any) -> None:
        with self._save_lock:  # the follower warns from its own thread
            self._launch = replace(self._launch, **changes)
            self._launch.save(self.run)


class LocalQueue:
    """Supervises runs, ``max_parallel`` at a time. Each slot has its share of the GPUs."""

    def __init__(self, runs: Sequence[RunFolder], target: Target, max_parallel: int) -> None:
        self._waiting = deque(LocalRun(run, target) for run in runs)
        self._current: list[LocalRun] = []
        self._stopped: list[int] = []
        self._queue_lock = threading.Lock()
        self._shares = share_gpus(min(max_parallel, len(runs)))

    def forward_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to every worker, and start no further one."""
        self._stopped.append(number)
        # Do not take the lock: the handler may have interrupted its holder in this thread. Iterate over a copy, because
        # slots remove their runs.
        for local in [*self._current]:
            local.signal(number)

    def work(self) -> None:
        """Start the first run, report to the client, and continue until every run is over."""
        first, *others = self._shares
        local = self._pop()
        assert local is not None
        self._start(local, first)
        report_start()
        leave_client(local.run)
        # Each slot is a thread, because it only waits for a worker's end.
        slots = [threading.Thread(target=self._work_slot, args=(share, None)) for share in others]
        for slot in slots:
            slot.start()
        self._work_slot(first, local)
        for slot in slots:
            slot.join()

    def _work_slot(self, share: Mapping[str, str], local: LocalRun | None) -> None:
        while True:
            if local is not None:
                local.finish()
                self._current.remove(local)
            local = self._pop()
            if local is None:
                return
            self._start(local, share)

    def _pop(self) -> LocalRun | None:
        with self._queue_lock:
            if self._stopped or not self._waiting:
                return None
            local = self._waiting.popleft()
            self._current.append(local)
            return local

    def _start(self, local: LocalRun, share: Mapping[str, str]) -> None:
        if not local.run.cancel_file.exists():
            local.start(self._stopped, share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Detach from the client's process tree, then supervise."""
    parser = argparse.ArgumentParser(prog="python -m sparsebp_cli.target.watcher")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--worker", default="sparsebp_cli.worker", metavar="MODULE")
    parser.add_argument("--max-parallel", type=int, default=1)
    parsed = parser.parse_args(arguments)
    keep_private()
    detach()
    target = LocalTarget(TargetOptions(worker=parsed.worker))
    try:
        queue = LocalQueue(open_runs(parsed.runs), target, parsed.max_parallel)
        signal.signal(signal.SIGINT, queue.forward_signal)
        signal.signal(signal.SIGTERM, queue.forward_signal)
        queue.work()
    except (SparseBPError, OSError) as error:
        report_start(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
