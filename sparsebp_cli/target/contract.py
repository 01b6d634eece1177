"""The contract of targets: a target starts the worker of a run somewhere and returns a handle on the run.

A run outlives the process that submitted it. So a :class:`Job` holds nothing that cannot be found again from the
run's folder, and :meth:`Target.reattach` gives any later process an equal job.
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
        level: ``fail`` keeps runs from working, ``warn`` does not.
        what: The property that was checked, such as ``disk``.
        text: The finding, in one line.
        hint: The remedy; empty when nothing has to be done.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    text: str
    hint: str = ""


class Job(ABC):
    """A handle on one submitted run."""

    @property
    @abstractmethod
    def run(self) -> RunFolder:
        """The run."""

    @abstractmethod
    def status(self) -> State:
        """Return what the run is doing."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether nothing is left to do: the run is over and its numbers were sent to the tracking store."""

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> State:
        """Wait until the job is settled.

        Args:
            timeout_seconds: Give up waiting after so long; None waits for ever.

        Returns:
            The state at the end of waiting; still running when the time ran out.
        """

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the last worker's exit code; negative: killed by that signal; None: it lives or the code is
        unknown.
        """

    @abstractmethod
    def warning(self) -> str:
        """Return what went wrong apart from the run, such as an unreachable tracking store; empty when nothing did."""

    @abstractmethod
    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield what the worker printed, line by line, without line ends.

        Args:
            follow: Go on until the run is over.

        Yields:
            A line.
        """

    @abstractmethod
    def stop(self) -> None:
        """Request a checkpoint and an end, also of runs that wait behind this one; the run can be resumed."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once; what it did since its last checkpoint is repeated on resume."""

    @abstractmethod
    def cancel(self, grace_seconds: float = 30.0) -> State:
        """Stop the run for good. A run that is over stays as it is.

        Args:
            grace_seconds: Time for a last checkpoint; then the worker is killed.

        Returns:
            The state afterwards: cancelled, or the state in which the run was over already.
        """

    @abstractmethod
    def fetch(self) -> Path:
        """Bring the run's results to this machine.

        Returns:
            The run's folder.
        """


class Target(ABC):
    """A place where plans are run. Installed under the entry-point group ``sparsebp.targets``, by the name of its kind.

    A target is made of its options alone: ``target_class(options)``.
    """

    options_class: ClassVar[type[TargetOptions]] = TargetOptions

    @abstractmethod
    def command(self, run: RunFolder) -> list[str]:
        """Return the exact command that starts the run; nothing is started or written.

        Args:
            run: Its folder. Together with :meth:`files` this is all that ``--dry-run`` prints.

        Returns:
            The words of the command.
        """

    def files(self, run: RunFolder) -> dict[str, str]:
        """Return the files that the command reads, such as a batch script: name to content. Nothing is written.

        Args:
            run: Folder of the run, with its plan.

        Returns:
            The files; empty where the command needs none.
        """
        return {}

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that cannot run there, as far as this machine can know.

        Args:
            plan: A plan whose run is not started yet.

        Raises:
            UsageError: It cannot run there; the text gives the reason.
        """
        return  # most plans can run anywhere

    def recover(self, run: RunFolder) -> None:
        """Ask for the worker of a run whose folder does not tell how its last start ended, and make the run
        unreachable if there is one, so that a new process follows it. On this machine the locks tell.

        Args:
            run: Folder of the run.

        Raises:
            UnreachableError: The place does not answer.
        """
        return

    @abstractmethod
    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        """Start runs, new ones and those to be resumed. Returns when the first has started.

        Args:
            runs: Their folders, with a plan in each.
            max_parallel: Number of runs that work at once, at least 1; they start in order.

        Returns:
            One job a run, in order.

        Raises:
            RunBusyError: Another process works on one of them.
            RunFailedError: The first could not be started.
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
        """Return a job for a run that any process submitted before. Never starts it again."""

    @abstractmethod
    def check(self) -> Iterator[CheckResult]:
        """Check whether plans can run there: whether it answers, its version, GPUs, disk, image.

        Yields:
            One result a check, failures included; a target that cannot be reached yields a ``fail``.
        """
