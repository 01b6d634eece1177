"""Define the contract of targets: a target starts a run's worker somewhere and returns a handle on the run.

A run outlives the process that submitted it. So a :class:`Job` holds only what can be found again from the run's
folder, and :meth:`Target.reattach` gives any later process an equal job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, State


class CheckResult(NamedTuple):
    """The result of one check of a target.

    Args:
        level: ``fail`` prevents runs from working, ``warn`` does not.
        what: The property that was checked, such as ``disk``.
        text: The finding, in one line.
        hint: The remedy; empty if none is needed.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    text: str
    hint: str = ""


class Job(ABC):
    """A submitted run, to read its state, follow it or cancel it."""

    @property
    @abstractmethod
    def run(self) -> RunFolder:
        """The folder of the run."""

    @abstractmethod
    def status(self) -> State:
        """Return the current state of the run."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether nothing is left to do: the run is over and its results were sent to the tracking store."""

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> State:
        """Wait until the job is settled.

        Args:
            timeout_seconds: Longest time to wait; None waits for ever.

        Returns:
            The state at the end of waiting; the run may still be running if the time ran out.
        """

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the last worker's exit code, negative if a signal killed it; None if alive or unknown."""

    @abstractmethod
    def warning(self) -> str:
        """Return a problem outside the run, such as an unreachable tracking store; empty if there is none."""

    @abstractmethod
    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the worker's output line by line, without line ends.

        Args:
            follow: Continue until the run is over.

        Yields:
            A line.
        """

    @abstractmethod
    def stop(self) -> None:
        """Request a checkpoint and a stop. Runs waiting behind this one stop too. All can be resumed."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once. A resume repeats its steps since the last checkpoint."""

    @abstractmethod
    def cancel(self, grace_seconds: float = 30.0) -> State:
        """Stop the run for good. A run that is over does not change.

        Args:
            grace_seconds: Time for a last checkpoint before the run is killed.

        Returns:
            The state afterwards: cancelled, or the earlier state if the run was already over.
        """

    @abstractmethod
    def fetch(self) -> Path:
        """Copy the run's results to this machine.

        Returns:
            The run's folder.
        """


class Target(ABC):
    """A place where plans run. Installed in the entry-point group ``sparsebp.targets``, under the name of its kind.

    A target is constructed from its options alone: ``target_class(options)``.
    """

    options_class: ClassVar[type[TargetOptions]] = TargetOptions

    @abstractmethod
    def command(self, run: RunFolder) -> list[str]:
        """Return the exact command that starts the run, without starting or writing anything.

        Args:
            run: Its folder. ``--dry-run`` prints only this command and :meth:`files`.

        Returns:
            The words of the command.
        """

    def files(self, run: RunFolder) -> dict[str, str]:
        """Return the files that the command reads, such as a batch script, as name to content. Write nothing.

        Args:
            run: Folder of the run, with its plan.

        Returns:
            The files; empty if the command needs none.
        """
        return {}

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that cannot run there, as far as this machine can know.

        Args:
            plan: A plan whose run has not started yet.

        Raises:
            UsageError: The plan cannot run there; the text gives the reason.
        """
        return  # most plans can run anywhere

    def recover(self, run: RunFolder) -> None:
        """Look for a worker if the run's folder does not say how its last start ended.

        If there is a worker, mark the run unreachable, so that a new process follows it. On this machine the locks
        suffice.

        Args:
            run: Folder of the run.

        Raises:
            UnreachableError: The target does not answer.
        """
        return

    @abstractmethod
    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        """Start runs, new ones and those to resume. Return when the first has started.

        Args:
            runs: Their folders, with a plan in each.
            max_parallel: Number of runs that train at the same time, at least 1. They start in order.

        Returns:
            One job for each run, in order.

        Raises:
            RunBusyError: Another process works on one of the runs.
            RunFailedError: The first run could not be started.
            UnreachableError: The target does not answer; nothing was started.
            UsageError: A plan cannot run there.
        """

    def submit(self, run: RunFolder) -> Job:
        """Start one run; see :meth:`submit_all`.

        Args:
            run: Its folder, with a plan in it.

        Returns:
            The job.
        """
        return self.submit_all([run])[0]

    @abstractmethod
    def reattach(self, run: RunFolder) -> Job:
        """Return a job for a run that any process submitted before, without starting the run again."""

    @abstractmethod
    def check(self) -> Iterator[CheckResult]:
        """Check whether plans can run there: whether the target answers, its version, GPUs, disk and image.

        Yields:
            One result for each check, including failures. An unreachable target yields a ``fail``.
        """
