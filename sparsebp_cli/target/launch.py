"""``target.json``: the processes that work on a run; and the part of every job that reads only the run's folder here.

A process id is trusted only after a check of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import psutil

from sparsebp_cli import errors
from sparsebp_cli.errors import RunFailedError, SparseBPError
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target.contract import Job

POLL_SECONDS = 0.1
UPLOAD_SECONDS = 60.0  # a watcher gives up sending after 30


@dataclass(frozen=True)
class Launch:
    """One start of a run. The fields are the keys of ``target.json``."""

    after_attempt: int  # attempts in the journal before this start; the worker of this start writes a later one
    watcher_pid: int  # the process that supervises the worker
    worker_pid: int | None = None  # the worker; None until it was started
    started: float = field(default_factory=time.time)  # seconds since 1970
    exit_code: int | None = None  # of the worker, negative when killed by a signal; None until it ended
    # what went wrong apart from the run, such as an unreachable tracking store; empty when nothing did
    warning: str = ""
    sight: str = ""  # last known status elsewhere: waiting, working, unreachable, over; empty for a run on this machine
    handle: str = ""  # the engine's name of the worker, such as a container's; empty until it was started
    log_offset: int = 0  # where the output of this start begins in ``worker.log``

    def save(self, run: RunFolder) -> None:
        """Write it into the run's folder, atomically."""
        part = run.target_file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(run.target_file)

    @classmethod
    def load(cls, run: RunFolder) -> Self | None:
        """Read the newest start of a run; None when there was none."""
        try:
            return cls(**json.loads(run.target_file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def worker(self, run: RunFolder) -> psutil.Process | None:
        """Return the living worker, or None."""
        return None if self.worker_pid is None else _find_process(self.worker_pid, run)

    def watcher(self, run: RunFolder) -> psutil.Process | None:
        """Return the living watcher, or None."""
        return _find_process(self.watcher_pid, run)


def _find_process(pid: int, run: RunFolder) -> psutil.Process | None:
    """Return the process if its command line names this run: the system reuses process ids."""
    try:
        process = psutil.Process(pid)
        ours = any(run.run_id in argument for argument in process.cmdline())
    except psutil.Error:
        return None
    return process if ours else None


class RunHandle(Job):
    """A job that reads the run's status, log and exit code from its folder."""

    def __init__(self, run: RunFolder) -> None:
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
            over = not follow or self.status().over  # read before the log, so that the last lines are not missed
            new = _read_from(self._run.log_file, offset)
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if over:
                break
            time.sleep(POLL_SECONDS)
        if rest:
            yield rest.decode(errors="replace")

    @abstractmethod
    def fetch(self) -> Path:
        """Bring the run's results to this machine; see :meth:`Job.fetch`."""


def _read_from(file: Path, offset: int) -> bytes:
    try:
        with file.open("rb") as log:
            log.seek(offset)
            return log.read()
    except FileNotFoundError:
        return b""


def wait_for_last_upload(run: RunFolder) -> None:
    """Wait for the watcher of a run that just ended, which still sends the last metrics."""
    deadline = time.monotonic() + UPLOAD_SECONDS
    while run.is_locked("target") and run.state().over and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def start_process(module: str, options: Sequence[str], runs: Sequence[RunFolder]) -> None:
    """Start ``python -m MODULE OPTIONS RUN_FOLDER...`` and wait until it reports the start of the first run. The module
    calls :func:`report_start` once, then :func:`leave_client`. An error that it reports is raised here."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *options, *(str(run.path) for run in runs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # until it has reported; from then on it writes to watcher.log
        start_new_session=True,
    )
    text, _ = process.communicate()
    lines = text.decode(errors="replace").splitlines() or ["it ended without any output"]
    try:
        report = json.loads(lines[-1])
        kind, problem = str(report["error"]), str(report["text"])
    except (ValueError, TypeError, KeyError):
        kind, problem = "", lines[-1]
    if problem:
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, SparseBPError) and known is not SparseBPError:
            raise known(problem)
        raise RunFailedError(f"the run could not be started: {problem}")


def report_start(error: Exception | None = None) -> None:
    """Report to the waiting client that the first run was started, or the error that prevented it."""
    text = "" if error is None else str(error) or type(error).__name__
    print(json.dumps({"error": type(error).__name__ if error else "", "text": text}), flush=True)


def leave_client(run: RunFolder) -> None:
    """Redirect this process's output to ``watcher.log`` of a run: nobody reads the pipe any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    with (run.path / "watcher.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs whose folders a command line names."""
    return [RunFolder(path.absolute()) for path in paths]
