"""Define the interface of a system that runs workers: docker, podman, Slurm or Kubernetes.

:mod:`~sparsebp_cli.target.remote_run` does the rest. An engine keeps no state. It finds everything again from the run's
folder and from a handle, a short text such as a container's name. Each call succeeds or raises
:class:`UnreachableError`. Then the result is unknown and the caller repeats the call later. So every call must be
harmless if it is made twice.
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

LOST_CODE = 4  # a worker's exit code if another node of its run is lost
MOST_RESTARTS = 3  # of a run that lost a node


class Phase(StrEnum):
    """Whether a worker waits, runs or has ended."""

    WAITING = "waiting"
    WORKING = "working"
    OVER = "over"


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker, as reported by a target's system."""

    phase: Phase  # how far it is
    # its exit code, negative if a signal killed it; None: it is alive, or the code is unknown
    exit_code: int | None = None
    text: str = ""  # why it ended, if the engine knows more than the exit code says; else empty
    gone: bool = False  # whether the engine has no trace of the worker, so that nothing can be fetched


class TargetEngine(ABC):
    """Starts, monitors and ends workers in one system, such as docker or Slurm."""

    fastest_seconds: ClassVar[float] = 0.5  # between two polls of a young run
    slowest_seconds: ClassVar[float] = 5.0
    has_queue: ClassVar[bool] = False  # whether the engine itself decides when a worker starts

    @abstractmethod
    def command(self, run: RunFolder) -> list[str]:
        """Return the command that starts a run; see :meth:`Target.command`."""

    def files(self, run: RunFolder) -> dict[str, str]:
        """Return the files that the command reads; see :meth:`Target.files`."""
        return {}

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that cannot run there; see :meth:`Target.check_plan`."""
        return  # most plans can run anywhere

    def is_handle(self, text: str) -> bool:
        """Return whether a text is a valid handle of this engine."""
        return bool(text)

    @abstractmethod
    def find(self, run: RunFolder) -> str | None:
        """Return the handle of the run's worker, alive or not; None if there is none."""

    @abstractmethod
    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        """Copy the runs' folders to the target and start their workers. Return their handles. If two remote runners
        start the same run at once, at most one may succeed. An engine without its own queue gets one run a call. Raise
        ``RunBusyError`` if another remote runner was faster, ``RunFailedError`` if the run was refused, and
        ``UnreachableError`` if it is unknown whether it started; then :meth:`find` tells."""

    @abstractmethod
    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        """Return the status of the worker with this handle. Raise ``UnreachableError`` if it cannot be read."""

    @abstractmethod
    def pull(self, run: RunFolder, handle: str) -> None:
        """Append the new part of the remote event log and output to the local run's folder, in complete lines only."""

    @abstractmethod
    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        """Send SIGTERM or SIGKILL to the worker. Remove a waiting one from the queue."""

    @abstractmethod
    def fetch(self, run: RunFolder, handle: str) -> None:
        """Copy checkpoints, model and the rest of event log and output here. A partial copy must stay invisible."""

    @abstractmethod
    def release(self, run: RunFolder, handle: str) -> None:
        """Remove every trace of the run from the target; called after everything was fetched."""

    @abstractmethod
    def check(self) -> Iterator[CheckResult]:
        """Check whether plans can run there; see :meth:`Target.check`."""


def read_exit_code(code: int) -> int:
    """Convert a shell's exit code to a process's: N > 128 becomes the negative signal -(N - 128). 130 and 143 (SIGINT,
    SIGTERM) stay: a worker itself exits with them after it caught the signal and wrote a checkpoint."""
    return 128 - code if code > 128 and code not in {130, 143} else code
