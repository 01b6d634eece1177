"""The target ``local``: a process of its own on this machine, and one that watches over it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import psutil

from sparsebp_cli.errors import RunBusyError, RunFailedError
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target.contract import Job, Target
from sparsebp_cli.target.ending import settle
from sparsebp_cli.target.launch import Launch

POLL_SECONDS = 0.1
SENDING_SECONDS = 60.0  # a watcher gives up sending after 30


@final
class LocalJob(Job):
    """A grip on a run of this machine, held by nothing but its folder."""

    def __init__(self, run: RunFolder) -> None:
        """Take the grip.

        Args:
            run: The run.
        """
        self._run = run

    @property
    def run(self) -> RunFolder:
        return self._run

    def status(self) -> State:
        return self._run.state()

    def settled(self) -> bool:
        return self.status().over and not self._run.is_locked("target")

    def wait(self, timeout_seconds: float | None = None) -> State:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.settled() and (deadline is None or time.monotonic() < deadline):
            time.sleep(POLL_SECONDS)
        return self.status()

    def exit_code(self) -> int | None:
        launch = Launch.load(self._run)
        return launch.exit_code if launch else None

    def warning(self) -> str:
        launch = Launch.load(self._run)
        return launch.warning if launch else ""

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        rest, offset = b"", 0
        while True:
            over = not follow or self.status().over  # asked before reading, so that the last lines are not missed
            new = _read_from(self._run.log_file, offset)
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if over:
                break
            time.sleep(POLL_SECONDS)
        if rest:
            yield rest.decode(errors="replace")

    def stop(self) -> None:
        if (launch := Launch.load(self._run)) and (process := launch.watcher(self._run) or launch.worker(self._run)):
            _signal(process, signal.SIGINT)

    def kill(self) -> None:
        if (launch := Launch.load(self._run)) and (process := launch.worker(self._run)):
            _signal(process, signal.SIGKILL)

    def cancel(self, grace_seconds: float = 30.0) -> State:
        if self.status().over:
            return self.status()
        self._run.cancel_file.touch()
        deadline, asked = time.monotonic() + grace_seconds, None
        while (worker := self._worker()) is not None or not self.status().over:
            if worker is not None and worker != asked:
                _signal(worker, signal.SIGTERM)
                asked = worker
            elif worker is not None and time.monotonic() > deadline:
                _signal(worker, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._settle_orphan()
        return self.status()

    def fetch(self) -> Path:
        return self._run.path

    def _worker(self) -> psutil.Process | None:
        launch = Launch.load(self._run)
        return launch.worker(self._run) if launch else None

    def _settle_orphan(self) -> None:
        """Say how the run ended where the watcher, which should, was killed."""
        try:
            lock = self._run.lock("target")
        except RunBusyError:
            return
        launch = Launch.load(self._run)
        with lock:
            settle(self._run, None, after_attempt=launch.after_attempt if launch else 0)


@final
class LocalTarget(Target):
    """This machine."""

    options_class = TargetOptions

    def __init__(self, options: TargetOptions | None = None) -> None:
        """Choose what is run.

        Args:
            options: The recipe's; None: the defaults.
        """
        self.worker_module = (options or TargetOptions()).worker

    def command(self, run: RunFolder) -> list[str]:
        return [sys.executable, "-m", self.worker_module, str(run.plan_file)]

    def submit_all(self, runs: Sequence[RunFolder]) -> list[Job]:
        watcher = [sys.executable, "-m", "sparsebp_cli.target.watcher", "--worker", self.worker_module]
        for run in runs:
            _wait_for_sending(run)
            if run.is_locked("worker") or run.is_locked("target"):
                raise RunBusyError(f"run {run.run_id} is {run.state()}: it is being worked on by another process")
        process = subprocess.Popen(
            [*watcher, *(str(run.path) for run in runs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # until it could start, or said why not; from then on it has a log of its own
            start_new_session=True,
        )
        answer, _ = process.communicate()
        _check_answer(answer)
        return [self.reattach(run) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        return LocalJob(run)


def _wait_for_sending(run: RunFolder) -> None:
    """A run that just ended is still held by a watcher that sends its last numbers: it needs no decision, only time."""
    deadline = time.monotonic() + SENDING_SECONDS
    while run.is_locked("target") and run.state().over and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _check_answer(answer: bytes) -> None:
    lines = answer.decode(errors="replace").splitlines() or ["it ended without a word"]
    try:
        problem = json.loads(lines[-1])
        busy, text = problem["busy"], problem["text"]
    except (ValueError, TypeError, KeyError):
        busy, text = False, lines[-1]
    if busy:
        raise RunBusyError(text)
    if text:
        raise RunFailedError(f"the run could not be started: {text}")


def _read_from(file: Path, offset: int) -> bytes:
    try:
        with file.open("rb") as log:
            log.seek(offset)
            return log.read()
    except FileNotFoundError:
        return b""


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended by itself in this moment
