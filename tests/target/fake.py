"""A target inside this process, without installation. Tests can cut its connection and lose its workers.

target = FakeTarget(tmp_path / "there")
job = target.submit(run)
target.engine.cut()          # the target stops answering
assert job.status() is State.UNREACHABLE
"""

from __future__ import annotations

import io
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.budget import size_of
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import append_lines, merge_into_run, pack, receive
from sparsebp_cli.target.contract import CheckResult, Job, Target
from sparsebp_cli.target.dispatcher import Dispatcher
from sparsebp_cli.target.engine import Phase, TargetEngine, WorkerStatus
from sparsebp_cli.target.remote import RemoteJob
from sparsebp_cli.testing.worker import work


class _Killed(BaseException):
    """Ends a worker without any output."""


@dataclass
class _Worker:
    run: RunFolder
    thread: threading.Thread | None = None
    asked: list[int] = field(default_factory=list)
    exit_code: int | None = None
    output: str = ""

    def start(self) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.exit_code = work(self.run, self._next)
        except _Killed:
            self.exit_code = -signal.SIGKILL
        except Exception as error:
            self.output += f"{type(error).__name__}: {error}\n"
            self.exit_code = 1

    def _next(self) -> int | None:
        if signal.SIGKILL in self.asked:
            raise _Killed
        return self.asked[0] if self.asked else None


@final
class FakeEngine(TargetEngine):
    """A folder of this machine that represents another machine; workers are threads."""

    fastest_seconds: ClassVar[float] = 0.02
    slowest_seconds: ClassVar[float] = 0.05

    def __init__(self, there: Path) -> None:
        """Choose the folder.

        Args:
            there: Folder that represents the other machine, empty or missing.
        """
        self.there = there
        self.reachable: bool = True
        self.refusal = ""
        self._workers: dict[str, _Worker] = {}

    def cut(self) -> None:
        """Stop answering. Workers continue."""
        self.reachable = False

    def mend(self) -> None:
        """Answer again."""
        self.reachable = True

    def lose(self, run: RunFolder) -> None:
        """Lose a worker and everything that it wrote, as when a machine is replaced."""
        worker = self._workers.pop(run.run_id)
        worker.asked.append(signal.SIGKILL)
        shutil.rmtree(worker.run.path, ignore_errors=True)

    def kill(self, run: RunFolder) -> None:
        """Kill a worker, as the system does when it is out of memory."""
        self._workers[run.run_id].asked.append(signal.SIGKILL)

    def command(self, run: RunFolder) -> list[str]:
        return ["fake", "run", run.run_id]

    def find(self, run: RunFolder) -> str | None:
        self._reach()
        return run.run_id if run.run_id in self._workers else None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        self._reach()
        if self.refusal:
            raise RunFailedError(self.refusal)
        (run,) = runs
        if run.run_id in self._workers:
            raise RunBusyError(f"run {run.run_id} is there already")
        self.there.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        pack(buffer, run, run.run_id)
        buffer.seek(0)
        part = receive(buffer, RunFolder(self.there))
        (part / run.run_id).rename(self.there / run.run_id)
        worker = _Worker(RunFolder(self.there / run.run_id))
        self._workers[run.run_id] = worker
        worker.start()
        return [run.run_id]

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        self._reach()
        worker = self._workers.get(handle)
        if worker is None:
            return WorkerStatus(Phase.OVER, text="its worker is gone", gone=True)
        if worker.exit_code is None:
            return WorkerStatus(Phase.WORKING)
        return WorkerStatus(Phase.OVER, worker.exit_code)

    def pull(self, run: RunFolder, handle: str) -> None:
        self._reach()
        journal = run.path / JOURNAL
        there = self.there / handle / JOURNAL
        append_lines(journal, there.read_bytes()[size_of(journal) :] if there.exists() else b"")

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        self._reach()
        self._workers[handle].asked.append(number)

    def fetch(self, run: RunFolder, handle: str) -> None:
        self._reach()
        shutil.rmtree(run.path / ".part-fetch", ignore_errors=True)
        shutil.copytree(self.there / handle, run.path / ".part-fetch" / handle)
        merge_into_run(run.path / ".part-fetch", handle, run)
        with run.log_file.open("a", encoding="utf-8") as log:
            log.write(self._workers[handle].output)
            self._workers[handle].output = ""

    def release(self, run: RunFolder, handle: str) -> None:
        self._reach()
        shutil.rmtree(self.there / handle)
        del self._workers[handle]

    def check(self) -> Iterator[CheckResult]:
        level, text = ("ok", "answers") if self.reachable else ("fail", "does not answer")
        yield CheckResult("ok" if level == "ok" else "fail", "reachable", text)

    def _reach(self) -> None:
        if not self.reachable:
            raise UnreachableError("the fake cannot be reached: its line is cut")


@final
class FakeTarget(Target):
    """A target inside this process. It dispatches in threads, with the same code as remote targets."""

    def __init__(self, there: Path) -> None:
        """Choose the folder.

        Args:
            there: An empty or missing folder, in which workers write.
        """
        self.engine: FakeEngine = FakeEngine(there)
        self._threads: list[threading.Thread] = []

    def command(self, run: RunFolder) -> list[str]:
        return self.engine.command(run)

    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        self._dispatch(runs, max_parallel, adopt_only=False)
        return [RemoteJob(run, self.engine) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        return RemoteJob(run, self.engine)

    def check(self) -> Iterator[CheckResult]:
        yield from self.engine.check()

    def _dispatch(self, runs: Sequence[RunFolder], max_parallel: int, *, adopt_only: bool) -> None:
        dispatcher = Dispatcher(runs, self.engine, max_parallel=max_parallel, adopt_only=adopt_only)
        dispatcher.begin()
        thread = threading.Thread(target=dispatcher.run_to_end, daemon=True)
        thread.start()
        self._threads.append(thread)
