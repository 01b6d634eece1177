"""The interface of a system that runs workers: docker, podman, Slurm or Kubernetes.

:mod:`~sparsebp_cli.target.remote_run` does the rest. An engine keeps no state: everything is found again from the
run's folder and from a handle, a short text such as a container's name. Each call succeeds or raises
:class:`UnreachableError`; then nothing is known, and the caller repeats it later. So every call must be harmless when
it is made twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.contract import CheckResult

LOST_CODE = 4  # a worker's exit code where another node of its run is lost
MOST_RESTARTS = 3  # of a run that has lost a node


class Phase(StrEnum):
    """How far a worker is, as its engine reports it."""

    WAITING = "waiting"
    WORKING = "working"
    OVER = "over"


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker."""

    phase: Phase  # how far it is
    # its exit code; negative: killed by that signal; None: it lives, or the code is unknown
    exit_code: int | None = None
    text: str = ""  # why it ended, where the engine knows better than the exit code does; empty otherwise
    gone: bool = False  # whether the engine has no trace of it any more, so that nothing can be fetched


class TargetEngine(ABC):
    """One system that runs workers."""

    fastest_seconds: ClassVar[float] = 0.5  # between two polls, while a run is young
    slowest_seconds: ClassVar[float] = 5.0
    has_queue: ClassVar[bool] = False  # whether the engine itself decides when a worker starts

    @abstractmethod
    def command(self, run: RunFolder) -> list[str]:
        """Return the command that starts a run; see :meth:`Target.command`."""

    def files(self, run: RunFolder) -> dict[str, str]:
        """Return the files that the command reads; see :meth:`Target.files`."""
        return {}

    def check_plan(self, plan: Plan) -> None:
        """See :meth:`Target.check_plan`."""
        return  # most plans can run anywhere

    def is_handle(self, text: str) -> bool:
        """Return whether a text can be a handle of this engine."""
        return bool(text)

    @abstractmethod
    def find(self, run: RunFolder) -> str | None:
        """Return the handle of the run's worker, alive or not; None when there is none."""

    @abstractmethod
    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        """Copy the runs' folders there and start their workers; return their handles. Two dispatchers that start one
        run at once must not both succeed. Without a queue of its own, an engine gets one run a call. Raises
        ``RunBusyError`` when another dispatcher was quicker, ``RunFailedError`` when the run was refused, and
        ``UnreachableError`` when it is not known whether it was started; then :meth:`find` will tell."""

    @abstractmethod
    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        """Return the status of the worker with this handle; raises ``UnreachableError`` when it cannot be read."""

    @abstractmethod
    def pull(self, run: RunFolder, handle: str) -> None:
        """Append the new part of journal and output there to the run's folder here; whole lines only."""

    @abstractmethod
    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        """Send SIGTERM or SIGKILL to the worker; one that waits is removed from the queue."""

    @abstractmethod
    def fetch(self, run: RunFolder, handle: str) -> None:
        """Copy checkpoints, model and the rest of journal and output here; a partial copy stays invisible."""

    @abstractmethod
    def release(self, run: RunFolder, handle: str) -> None:
        """Remove every trace of the run there; called after everything was fetched."""

    @abstractmethod
    def check(self) -> Iterator[CheckResult]:
        """See :meth:`Target.check`."""


def read_exit_code(code: int) -> int:
    """Return a process's exit code from a shell's: N > 128 is the signal N - 128, given as a negative number. 130 and
    143 (SIGINT, SIGTERM) stay: a worker itself exits with them after it caught the signal and wrote a checkpoint."""
    return 128 - code if code > 128 and code not in {130, 143} else code
