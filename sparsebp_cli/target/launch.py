"""``target.json``: the processes that work on a run. A process id is trusted only after a check of the process."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Self

import psutil

from sparsebp_cli.run import RunFolder


@dataclass(frozen=True)
class Launch:
    """One start of a run. The fields are the keys of ``target.json``.

    Args:
        after_attempt: Attempts in the journal before this start; the worker of this start writes a later one.
        watcher_pid: The process that supervises the worker.
        worker_pid: The worker; None until it was started.
        started: Seconds since 1970.
        exit_code: Of the worker, negative when killed by a signal; None until it ended.
        warning: What went wrong apart from the run, such as an unreachable tracking store; empty when nothing did.
        sight: Last known status elsewhere: waiting, working, unreachable, over; empty for a run on this machine.
        handle: The engine's name of the worker, such as a container's; empty until it was started.
        log_offset: Where the output of this start begins in ``worker.log``.
    """

    after_attempt: int
    watcher_pid: int
    worker_pid: int | None = None
    started: float = field(default_factory=time.time)
    exit_code: int | None = None
    warning: str = ""
    sight: str = ""
    handle: str = ""
    log_offset: int = 0

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
