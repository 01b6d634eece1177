"""What a place that runs workers has to be able to do, so that :mod:`~sparsebp_cli.target.errand` does the rest.

An engine keeps no state: everything is found again from the run's folder and from a handle, a short text such as a
container's name. Each call gets through and says what it found, or raises :class:`UnreachableError`: then nothing is
known, and the call is made again later. So every call must be harmless when it is made twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.contract import Finding


class Phase(StrEnum):
    """How far a worker is, as its place sees it."""

    WAITING = "waiting"
    WORKING = "working"
    OVER = "over"


@dataclass(frozen=True)
class Sight:
    """What was seen of a worker.

    Args:
        phase: How far it is.
        exit_code: What it ended with; negative: killed by that signal; None: it lives, or nobody knows.
        text: Why it ended, where the place knows better than the exit code; empty otherwise.
        gone: Whether the place has no trace of it any more, so that nothing can be fetched.
    """

    phase: Phase
    exit_code: int | None = None
    text: str = ""
    gone: bool = False


class Engine(ABC):
    """One place that runs workers."""

    fastest_seconds: ClassVar[float] = 0.5  # between two looks, while a run is young
    slowest_seconds: ClassVar[float] = 5.0
    has_queue: ClassVar[bool] = False  # whether the place itself decides when a worker starts

    @abstractmethod
    def command(self, run: RunFolder) -> list[str]:
        """Return the command that starts a run; see :meth:`Target.command`."""

    def files(self, run: RunFolder) -> dict[str, str]:
        """Return the files that the command reads; see :meth:`Target.files`."""
        return {}

    def check_plan(self, plan: Plan) -> None:
        """See :meth:`Target.check_plan`."""
        return  # most plans can be carried out anywhere

    @abstractmethod
    def find(self, run: RunFolder) -> str | None:
        """Return the handle of a worker of this run that is there, alive or not; None when there is none."""

    @abstractmethod
    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        """Bring the runs' folders there and start their workers.

        Two dispatchers that start one run at once must not both succeed.

        Args:
            runs: One, unless the engine has a queue of its own.
            max_parallel: How many of them may work at once.

        Returns:
            Their handles.

        Raises:
            RunBusyError: Another dispatcher was quicker.
            RunFailedError: It was refused there.
            UnreachableError: It is not known whether it was started; :meth:`find` will tell.
        """

    @abstractmethod
    def look(self, run: RunFolder, handle: str) -> Sight:
        """Return what the worker is doing.

        Args:
            run: The run.
            handle: Its handle.

        Returns:
            What was seen.

        Raises:
            UnreachableError: Nothing was seen.
        """

    @abstractmethod
    def pull(self, run: RunFolder, handle: str) -> None:
        """Append what is new there of journal and output to the run's folder here; whole lines only."""

    @abstractmethod
    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        """Send SIGTERM or SIGKILL to the worker; one that waits is taken out of the queue."""

    @abstractmethod
    def fetch(self, run: RunFolder, handle: str) -> None:
        """Bring checkpoints, model and the rest of journal and output here; what arrived half is not visible."""

    @abstractmethod
    def release(self, run: RunFolder, handle: str) -> None:
        """Remove every trace of the run there; called after everything was fetched."""

    @abstractmethod
    def check(self) -> Iterator[Finding]:
        """See :meth:`Target.check`."""
