"""The part of every job that reads only the run's folder on this machine."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target.contract import Job
from sparsebp_cli.target.launch import Launch

POLL_SECONDS = 0.1


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
