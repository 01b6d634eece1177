"""Read and write ``target.json``, which names the processes that work on a run, and implement the part of every job
that reads only the run's local folder.

A process id is trusted only after the process was checked.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO, UnsupportedOperation
from pathlib import Path
from typing import Self

import psutil

from sparsebp_cli import errors
from sparsebp_cli.errors import RunBusyError, RunFailedError, SparseBPError, UnreachableError
from sparsebp_cli.run import RunFolder, State, durable, interpreter
from sparsebp_cli.run.budget import LARGEST_SMALL, LONGEST_LINE, open_regular, open_to_append, read_json
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.contract import Job
from sparsebp_cli.target.end_record import write_end_record

POLL_SECONDS = 0.1
REPORT_SECONDS = 1.0  # between two checks whether a starting process is alive
CHUNK = 1 << 16
UPLOAD_SECONDS = 60.0  # the local runner gives up sending after 30
START_SECONDS = 3600.0  # for reporting the start: long enough to send a resumed run's checkpoints over a slow line


@dataclass(frozen=True)
class Launch:
    """One start of a run. The fields are the keys of ``target.json``."""

    after_attempt: int  # attempts in the event log before this start; this start's worker records a later one
    watcher_pid: int  # the process that supervises the worker
    worker_pid: int | None = None  # the worker; None until it was started
    started: float = field(default_factory=time.time)  # seconds since 1970
    exit_code: int | None = None  # of the worker, negative if a signal killed it; None until it ended
    # a problem outside the run, such as an unreachable tracking store; empty if there is none
    warning: str = ""
    sight: str = ""  # last known remote status: waiting, working, unreachable, over; empty for a local run
    handle: str = ""  # the engine's name for the worker, such as a container's; empty until it was started
    log_offset: int = 0  # where the output of this start begins in ``worker.log``

    def save(self, run: RunFolder) -> None:
        """Write it into the run's folder, atomically."""
        durable.write_file(run.target_file, json.dumps(asdict(self)))

    @classmethod
    def load(cls, run: RunFolder) -> Self | None:
        """Read the newest start of a run; None if there was none. If the file is unreadable, a start is assumed: a
        remote worker may be alive, and the engine finds it by its label."""
        try:
            return cls(**read_json(run.target_file, LARGEST_SMALL))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            return cls(0, 0, sight="unreachable" if run.is_elsewhere() else "")

    def worker(self, run: RunFolder) -> psutil.Process | None:
        """Return the worker if it is alive, else None."""
        return None if self.worker_pid is None else _find_process(self.worker_pid, run)

    def watcher(self, run: RunFolder) -> psutil.Process | None:
        """Return the supervising process if it is alive, else None."""
        return _find_process(self.watcher_pid, run)


def _find_process(pid: int, run: RunFolder) -> psutil.Process | None:
    """Return the process if its command line names this run: the system reuses process ids."""
    if pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        ours = any(run.run_id in argument for argument in process.cmdline())
    except psutil.Error:
        return None
    return process if ours else None


def find_worker(run: RunFolder) -> psutil.Process | None:
    """Return the living worker of a run on this machine, or None, even if its ``target.json`` is lost."""
    launch = Launch.load(run)
    if launch is not None and launch.watcher_pid:
        return launch.worker(run)
    if not run.is_locked("worker"):
        return None
    for process in psutil.process_iter(["cmdline"]):
        if str(run.plan_file) in (process.info["cmdline"] or ()):
            return process
    return None


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
            if len(rest) >= LONGEST_LINE:  # a line without an end is yielded in pieces
                yield rest.decode(errors="replace")
                rest = b""
            if len(new) == LONGEST_LINE:
                continue
            if over:
                break
            time.sleep(POLL_SECONDS)
        if rest:
            yield rest.decode(errors="replace")

    @abstractmethod
    def fetch(self) -> Path:
        """Copy the run's results to this machine; see :meth:`Job.fetch`."""


def _read_from(file: Path, offset: int) -> bytes:
    if file.is_symlink():  # in a stranger's folder, a link could expose a file of this user
        raise UnsupportedOperation(f"{file} is a link, which is not followed")
    try:
        with open_regular(file) as log:
            log.seek(offset)
            return log.read(LONGEST_LINE)
    except FileNotFoundError:
        return b""


def wait_for_last_upload(run: RunFolder) -> None:
    """Wait until the supervising process of an ended run has sent the last metrics."""
    deadline = time.monotonic() + UPLOAD_SECONDS
    while run.is_locked("target") and run.state().over and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def start_process(module: str, options: Sequence[str], runs: Sequence[RunFolder]) -> None:
    """Start ``python -m MODULE OPTIONS RUN_FOLDER...`` and wait until it reports that the first run started. The module
    must call :func:`report_start` once, then :func:`leave_client`. Raise the error that it reports."""
    process = subprocess.Popen(
        interpreter.command("-m", module, *options, *(str(run.path) for run in runs)),
        env=interpreter.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # until its report; afterwards it writes to watcher.log
        # Ctrl-C in the client's terminal must not reach it.
        start_new_session=True,
    )
    kind, problem = _read_report(process)
    if problem:
        known = getattr(errors, kind, None)
        in_doubt = [run.run_id for run in runs if run.state() is State.UNREACHABLE]
        for run in runs if known is not RunBusyError else ():  # otherwise another process takes care of the run
            _record_failed_start(run, problem)
        if isinstance(known, type) and issubclass(known, SparseBPError) and known is not SparseBPError:
            raise known(problem)
        if in_doubt:  # it ended between its request to the target and the answer
            raise UnreachableError(
                f"the process that starts the run ended: {problem}; the run may still train: `sparsebp resume "
                f"{' '.join(in_doubt)}` finds out, and continues the run"
            )
        raise RunFailedError(f"the run could not be started: {problem}")


def _record_failed_start(run: RunFolder, problem: str) -> None:
    """Record the failure of a run that never started and that no process will start; otherwise it would stay queued for
    ever. Runs in any other state do not change."""
    if run.state() is not State.QUEUED:
        return
    with suppress(RunBusyError, OSError), run.lock("target"):
        write_end_record(run, None, after_attempt=0, text=f"it could not be started: {problem}", failed=True)
        Launch(0, 0, sight="over" if run.is_elsewhere() else "").save(run)


def _read_report(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Return the class and text of the error that a starting process reports; both empty if it has started. Read its
    output only up to the report, because its child processes may hold the pipe open."""
    assert process.stdout is not None
    printed, pid, deadline = b"", process.pid, time.monotonic() + START_SECONDS
    with process.stdout:
        while True:
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"process {pid}, which starts the run, has reported nothing for {START_SECONDS / 60:g} minutes; "
                    "SparseBP did not stop it; `sparsebp runs` shows the state of the run"
                )
            alive = _is_alive(pid, process)  # check before reading: a dead process's output is already in the pipe
            ready, _, _ = select.select([process.stdout], [], [], REPORT_SECONDS)
            data = os.read(process.stdout.fileno(), CHUNK) if ready else b""
            printed += data
            *complete, rest = printed.decode(errors="replace").split("\n")
            for line in complete:  # skip an incomplete line: its rest is still being written
                match _read_json(line):
                    case {"pid": int(number)}:
                        pid = number
                    case {"error": kind, "text": problem}:
                        process.wait()
                        if problem:  # its locks are free once it has ended
                            _wait_briefly(pid)
                        return str(kind), str(problem)
            if (ready and not data) or (not ready and not alive):
                process.wait()
                said = [line for line in (*complete, rest) if line.strip() and not isinstance(_read_json(line), dict)]
                return "", said[-1] if said else "no reason was printed"


def _is_alive(pid: int, process: subprocess.Popen[bytes]) -> bool:
    # The started process ends when it has detached; then the process that it named does the work.
    return process.poll() is None or (pid != process.pid and psutil.pid_exists(pid))


def _wait_briefly(pid: int) -> None:
    with suppress(psutil.Error):
        psutil.Process(pid).wait(UPLOAD_SECONDS)


def _read_json(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def detach() -> None:
    """Continue in a child process and end this one. The client waits only for the parent, so no zombie is left. It gets
    the child's process id, so that it notices if the child dies without a report."""
    if child := os.fork():
        _tell({"pid": child})
        os._exit(0)


def report_start(error: Exception | None = None) -> None:
    """Report to the waiting client that the first run started, or the error that prevented it."""
    known = errors.explain_system_error(error) if isinstance(error, OSError) else ""
    text = "" if error is None else known or str(error) or type(error).__name__
    _tell({"error": type(error).__name__ if error else "", "text": text})


def _tell(content: dict[str, object]) -> None:
    """Write one line to the client in a single write, also with PYTHONUNBUFFERED. Ignore a client that is gone."""
    sys.stdout.flush()
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(content).encode() + b"\n")


def leave_client(run: RunFolder) -> None:
    """Redirect this process's output to the run's ``watcher.log``, because nobody reads the pipe any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        log = open_to_append(run.path / "watcher.log")
    except OSError:  # the run continues: it has started, and other places record what is printed here
        log = FileIO(os.devnull, "ab")
    with log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs whose folders a command line names. Raise ``UnsupportedOperation`` if a file that the run appends
    to is not a regular file: a worker that cannot write there could not report it."""
    runs = [RunFolder(path.absolute()) for path in paths]
    for file in (file for run in runs for file in (run.path / JOURNAL, run.log_file)):
        if file.exists() and not file.is_file():
            raise UnsupportedOperation(f"{file} is not a regular file")
    return runs
