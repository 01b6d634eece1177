"""Run workers in a folder of this machine, as on a host without a scheduler.

An example of a complete remote target. Its engine stores nothing itself: it finds a run again by the name of its
folder, and every call may be repeated.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, final

from pydantic import Field

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.target import (
    CheckResult,
    Phase,
    RemoteTarget,
    RunFolder,
    TargetEngine,
    TargetOptions,
    WorkerStatus,
    append_lines,
    merge_into_run,
    pack,
    read_exit_code,
    receive,
    size_of,
)

# The shell outlives this process and records the worker's exit code. It renames the code file, so a poll sees it whole.
SCRIPT = """\
"$0" -m "$1" "$2/plan.json" >> "$2/worker.log" 2>&1 &
echo $! > "$2/pid"; wait $!; echo $? > "$2/code.part"; mv "$2/code.part" "$2/code"
"""
OWN = ("started", "pid", "code")  # files that the engine adds to a run's folder


class FolderOptions(TargetOptions):
    """A folder of this machine, as on a host without a scheduler."""

    there: Path = Field(description="Folder in which runs train. It is created if it does not exist.")


@final
class FolderEngine(TargetEngine):
    """Run workers below a folder; the handle of a run is the name of its folder there."""

    fastest_seconds: ClassVar[float] = 0.05
    slowest_seconds: ClassVar[float] = 0.3

    def __init__(self, options: FolderOptions) -> None:
        """Store the options, the only state that an engine may have."""
        self._options = options

    def command(self, run: RunFolder) -> list[str]:
        return ["sh", "-c", SCRIPT, sys.executable, self._options.worker, str(self._place(run))]

    def find(self, run: RunFolder) -> str | None:
        return run.run_id if (self._place(run) / "started").exists() else None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:  # noqa: ARG002 - there is no queue
        (run,) = runs
        self._options.there.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        # the output of earlier attempts is sent along and grows there
        pack(stream, run, run.run_id, more=("worker.log",))
        stream.seek(0)
        part = receive(stream, RunFolder(self._options.there))
        try:
            (part / run.run_id).rename(self._place(run))  # if two remote runners start a run at once, one succeeds
        except OSError:
            raise RunBusyError(f"run {run.run_id} already exists in {self._options.there}") from None
        # A worker that inherited this process's output would keep the client waiting.
        none = subprocess.DEVNULL
        subprocess.Popen(self.command(run), start_new_session=True, stdin=none, stdout=none, stderr=none)
        (self._place(run) / "started").touch()
        return [run.run_id]

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:  # noqa: ARG002 - the run says where
        place = self._place(run)
        if not place.exists():
            return WorkerStatus(Phase.OVER, text="the run's folder does not exist any more", gone=True)
        code = place / "code"
        if code.exists():
            return WorkerStatus(Phase.OVER, read_exit_code(int(code.read_text(encoding="ascii"))))
        return WorkerStatus(Phase.WORKING)

    def pull(self, run: RunFolder, handle: str) -> None:  # noqa: ARG002
        for here in (run.journal_file, run.log_file):
            there = self._place(run) / here.name
            if there.exists():
                append_lines(here, there.read_bytes()[size_of(here) :])

    def signal(self, run: RunFolder, handle: str, number: int) -> None:  # noqa: ARG002
        with suppress(FileNotFoundError, ProcessLookupError):  # it has not begun, or is over
            os.kill(int((self._place(run) / "pid").read_text(encoding="ascii")), number)

    def fetch(self, run: RunFolder, handle: str) -> None:
        self.pull(run, handle)
        part = run.path / ".part-fetch"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(self._place(run), part / handle, ignore=shutil.ignore_patterns(*OWN))
        merge_into_run(part, handle, run)

    def release(self, run: RunFolder, handle: str) -> None:  # noqa: ARG002
        shutil.rmtree(self._place(run), ignore_errors=True)

    def check(self) -> Iterator[CheckResult]:
        there = self._options.there
        if there.exists() and not there.is_dir():
            yield CheckResult("fail", "folder", f"{there} is a file", "set the key there to a folder")
        else:
            yield CheckResult("ok", "folder", str(there))

    def _place(self, run: RunFolder) -> Path:
        return self._options.there / run.run_id


@final
class FolderTarget(RemoteTarget):
    """The target ``folder``."""

    options_class = FolderOptions
    engine_class = FolderEngine
