"""Watches over the workers of one or more runs of this machine, in a process that outlives the client.

    python -m sparsebp_cli.target.watcher [--max-parallel N] RUN_FOLDER...

It holds the target's lock of every run that it was given, starts the worker, sends the journal to the tracking store
while the worker lives, and says how the run ended where the worker could not. It is expendable: killed with -9, it
leaves the worker at work and the state, which is derived from locks and journal, right.
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
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, keep_private, read
from sparsebp_cli.target.contract import Target
from sparsebp_cli.target.device import share_gpus
from sparsebp_cli.target.ending import settle
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.local import LocalTarget
from sparsebp_cli.target.start import answer, folders, leave_client
from sparsebp_cli.tracking import Follower


class Watch:
    """One run that is being watched over."""

    def __init__(self, run: RunFolder, target: Target) -> None:
        """Take the run.

        Args:
            run: The run.
            target: Knows the worker's command.

        Raises:
            RunBusyError: Somebody else works on it.
        """
        self.run, self._target = run, target
        self._lock: FileLock = run.lock("target")
        if run.is_locked("worker"):  # a worker may live on without its watcher
            raise RunBusyError(f"run {run.run_id} is already being worked on by another process")
        attempts = max((record["attempt"] for record, _ in read(run.path)), default=0)
        self._launch = Launch(after_attempt=attempts, watcher_pid=os.getpid())
        self._launch.save(run)
        run.cancel_file.unlink(missing_ok=True)
        self._saving = threading.Lock()
        self._log_offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def start(self, signals: Sequence[int], environment: Mapping[str, str]) -> None:
        """Start the worker.

        Args:
            signals: Those that came in before there was a worker to hand them on to.
            environment: What the worker finds there beside what this process does.
        """
        with self.run.log_file.open("ab") as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                self._target.command(self.run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )
        self._save(worker_pid=self._process.pid)
        for number in [*signals]:
            if number not in self._signals:
                self.signal(number)

    def signal(self, number: int) -> None:
        """Hand a signal on to the worker.

        Args:
            number: Of the signal.
        """
        if self._process is not None:
            self._signals.append(number)
            self._process.send_signal(number)

    def finish(self) -> None:
        """Wait for the worker, then say how it ended where it could not, and send the last numbers."""
        follower = Follower(self.run, warn=self._warn).start()
        exit_code = None
        if self._process is not None:
            if self.run.cancel_file.exists():  # since the look before the start
                self._process.send_signal(signal.SIGTERM)
            exit_code = self._process.wait()
        try:
            self._settle(exit_code)
        except (SparseBPError, OSError) as error:
            with suppress(OSError):  # this output may be a file on the same disk
                print(f"how run {self.run.run_id} ended could not be written: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk takes no warning either
            self._save(warning=follower.stop().advice(self.run.run_id))
        self._lock.release()

    def _settle(self, exit_code: int | None) -> None:
        killed = exit_code == -signal.SIGKILL and self._signals
        settle(
            self.run,
            exit_code,
            after_attempt=self._launch.after_attempt,
            log_offset=self._log_offset,
            text="killed by the user; the steps since the last checkpoint are repeated on resume" if killed else "",
        )
        self._save(exit_code=exit_code)

    def _warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._save(warning=text)

    def _save(self, **changes: Any) -> None:
        with self._saving:  # the follower warns from a thread of its own
            self._launch = replace(self._launch, **changes)
            self._launch.save(self.run)


class Queue:
    """Runs that are watched over, so many at once; each slot has its share of the GPUs."""

    def __init__(self, runs: Sequence[RunFolder], target: Target, max_parallel: int) -> None:
        """Take the runs.

        Args:
            runs: With a plan in each.
            target: Knows the worker's command.
            max_parallel: Workers at once.
        """
        self._waiting = deque(Watch(run, target) for run in runs)
        self._current: list[Watch] = []
        self._stopped: list[int] = []
        self._taking = threading.Lock()
        self._shares = share_gpus(min(max_parallel, len(runs)))

    def hand_on(self, number: int, _frame: FrameType | None) -> None:
        """Hand a signal on to every worker, and start no other one."""
        self._stopped.append(number)
        for watch in [*self._current]:
            watch.signal(number)

    def work(self) -> None:
        """Start the first run, tell the client, and go on until every run is over."""
        first, *others = self._shares
        watch = self._take()
        assert watch is not None
        self._begin(watch, first)
        answer()
        leave_client(watch.run)
        slots = [threading.Thread(target=self._fill, args=(share, None)) for share in others]
        for slot in slots:
            slot.start()
        self._fill(first, watch)
        for slot in slots:
            slot.join()

    def _fill(self, share: Mapping[str, str], watch: Watch | None) -> None:
        while True:
            if watch is not None:
                watch.finish()
                self._current.remove(watch)
            watch = self._take()
            if watch is None:
                return
            self._begin(watch, share)

    def _take(self) -> Watch | None:
        with self._taking:
            if self._stopped or not self._waiting:
                return None
            watch = self._waiting.popleft()
            self._current.append(watch)
            return watch

    def _begin(self, watch: Watch, share: Mapping[str, str]) -> None:
        if not watch.run.cancel_file.exists():
            watch.start(self._stopped, share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Leave the client's process tree, then watch.

    Args:
        arguments: Of the command line; None: this process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m sparsebp_cli.target.watcher")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--worker", default="sparsebp_cli.worker", metavar="MODULE")
    parser.add_argument("--max-parallel", type=int, default=1)
    parsed = parser.parse_args(arguments)
    keep_private()
    if os.fork():
        os._exit(0)  # the client waits for this process only: no zombie is left to it
    target = LocalTarget(TargetOptions(worker=parsed.worker))
    try:
        queue = Queue(folders(parsed.runs), target, parsed.max_parallel)
        signal.signal(signal.SIGINT, queue.hand_on)
        signal.signal(signal.SIGTERM, queue.hand_on)
        queue.work()
    except (SparseBPError, OSError) as error:
        answer(error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
