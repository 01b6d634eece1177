"""PUBLIC. All errors that SparseBP raises for its users.

    SparseBPError                  any of the below; ``exit_code`` is the exit code of the command line
    ├── UsageError            2    a wrong argument, option or call
    │   ├── RecipeError       2    the recipe: has file, line, column and key
    │   ├── PolicyError       2    a policy or its options: unknown, broken, out of range
    │   ├── UnsupportedError  2    an unsupported combination, refused before anything starts
    │   ├── ChangedError      2    a run whose recipe, code or data differ from those of its checkpoint
    │   └── DataError         2    a model or dataset that cannot be found, read or trusted
    │       └── AbsentDataError 2  one that is missing on this machine; another machine may have it
    ├── RunNotFoundError    102    a name matches no run, or more than one
    ├── RunBusyError        101    another process is writing the run
    ├── UnreachableError    101    a target cannot be reached, so the state of its runs is unknown
    ├── RunFailedError      100    an error stopped the run
    │   ├── DivergedError   104    NaN or Inf in loss, gradient or weights
    │   └── CheckpointError 100    no checkpoint is valid, or one cannot be written
    └── TrackingError       100    the tracking store cannot be used (a warning while a run is alive)

An error's text says in one line what is wrong, the value got, and what is allowed.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from io import UnsupportedOperation
from typing import ClassVar

__all__ = [
    "AbsentDataError",
    "ChangedError",
    "CheckpointError",
    "DataError",
    "DivergedError",
    "PolicyError",
    "RecipeError",
    "RunBusyError",
    "RunFailedError",
    "RunNotFoundError",
    "SparseBPError",
    "TrackingError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "did_you_mean",
]


class SparseBPError(Exception):
    """Base of every error for the user. Its text is one line, shown without a traceback."""

    exit_code: ClassVar[int] = 100


class UsageError(SparseBPError):
    """A wrong argument, option or call."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that cannot be used: ``file:line:column: key: what is wrong``."""

    def __init__(self, text: str, *, file: str = "", line: int = 0, column: int = 0, key: str = "") -> None:
        """Store the text and its place.

        Args:
            text: One sentence: what is wrong, the value got, what is allowed.
            file: The recipe's path as the user gave it, or the ``--set KEY=VALUE`` that contains the value.
            line: Counted from 1; 0 if unknown.
            column: Counted from 1; 0 if unknown.
            key: Dotted path of the key, such as ``policy.0.keep``.
        """
        self.text: str = text
        self.file: str = file
        self.line: int = line
        self.column: int = column
        self.key: str = key
        self.others: Sequence[RecipeError] = ()  # the recipe's other errors, in the order of the file
        place = ":".join(str(part) for part in (file, line, column) if part)
        super().__init__(": ".join(part for part in (place, key, text) if part))


class PolicyError(UsageError):
    """A policy or its options: unknown name, broken plug-in, value out of range."""


class UnsupportedError(UsageError):
    """A combination that is not supported. Refused before anything starts."""


class DataError(UsageError):
    """A model or dataset that cannot be found, read or trusted."""


class AbsentDataError(DataError):
    """A model or dataset that is missing on this machine; another machine may have it."""


class ChangedError(UsageError):
    """The recipe, code or data of a run differ from those of its checkpoint."""

    def __init__(self, run_id: str, where: str, changes: Sequence[tuple[str, str, str]], *, text: str = "") -> None:
        """Store what changed.

        Args:
            run_id: Id of the run, for the command that continues it.
            where: Name of what the run is compared with, such as ``the checkpoint of step 8``.
            changes: (field, earlier value, current value) of each change.
            text: The whole text, instead of one that proposes to resume with the changes.
        """
        self.changes: list[tuple[str, ...]] = [tuple(change) for change in changes]
        if text:
            super().__init__(text)
            return
        shown = ", ".join(map(str, changes))
        options = " ".join(f"--allow-change {change[0]}" for change in changes)
        super().__init__(f"changed since {where}: {shown}; if this is intended: `sparsebp resume {run_id} {options}`")


class RunNotFoundError(SparseBPError):
    """A name matches no run, or more than one."""

    exit_code = 102


class RunBusyError(SparseBPError):
    """Another process is writing this run."""

    exit_code = 101


class UnreachableError(SparseBPError):
    """A target cannot be reached. Its runs continue; their states are unknown until the target answers again."""

    exit_code = 101


class RunFailedError(SparseBPError):
    """An error stopped the run."""

    exit_code = 100


class DivergedError(RunFailedError):
    """A loss, a gradient, a weight or the optimizer's state is not finite."""

    exit_code = 104


class CheckpointError(RunFailedError):
    """No checkpoint is valid, or one cannot be written."""


class TrackingError(SparseBPError):
    """The tracking store cannot be used."""


def first_line(error: BaseException | str) -> str:
    """Return the first non-empty line of an error or its text; without one, the name of the error's class."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__ if isinstance(error, BaseException) else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the known name nearest to what the user wrote, or an empty string."""
    near = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {show_name(near[0])}?" if near else ""


def show_name(name: str) -> str:
    """Return a name for a list of names: in quotes if it could be misread without.

    Args:
        name: Any name, such as a column's.

    Returns:
        The name, with quotes if it is empty, contains a comma or has white space at an end.
    """
    return repr(name) if not name or "," in name or name != name.strip() else name


# The pattern of a `did_you_mean` text. Errors of pydantic and other processes carry only text, so the name is parsed.
_NEAREST = re.compile(r"; did you mean (?P<name>.+?)\?(?=$|; |\n)")


def find_nearest(text: str) -> str | None:
    """Return the name that an error's text proposes instead of a wrong one; None if it proposes none."""
    found = _NEAREST.search(text)
    return found["name"] if found else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library says that memory is exhausted.

    Args:
        error: An error of Python, torch, pyarrow, safetensors or the system.

    Returns:
        Whether it does. Torch's errors are recognised by class name and text; this module imports no torch.
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)


# For each error of the system: what it refused, and what to do.
_SYSTEM = {
    errno.ENOSPC: "the disk is full: make room (`sparsebp prune` deletes checkpoints of finished runs), then repeat "
    "the command",
    errno.EDQUOT: "your quota is used up: make room (`sparsebp prune` deletes checkpoints), then repeat the command",
    errno.EROFS: "the file system is read-only: set SPARSEBP_HOME to a folder that can be written",
    errno.EACCES: "you may not write or read there: set SPARSEBP_HOME, or the path, to a folder of yours",
    errno.EPERM: "you may not do this there: set SPARSEBP_HOME, or the path, to a folder of yours",
    errno.EFBIG: "the file would exceed the limit of this shell: raise `ulimit -f`",
    errno.EIO: "the disk reports a fault: check the system's log before you trust its files",
    errno.ENOMEM: "no memory is left on this machine, or its limit is reached: end other programs, or raise `ulimit "
    "-v`",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine: end other programs",
    errno.ENOSYS: "the file system cannot do this (for example, lock a file): set SPARSEBP_HOME to a local disk",
    errno.ENOLCK: "the file system has no locks: set SPARSEBP_HOME to a local disk",
    errno.EOPNOTSUPP: "the file system cannot do this (for example, lock a file): set SPARSEBP_HOME to a local disk",
    errno.ESTALE: "the file server has lost this file: mount its folder again, then repeat the command",
    errno.EXDEV: "source and destination are on two file systems: keep the whole folder of runs on one",
    errno.ENAMETOOLONG: "the name is too long for a file",
    errno.EISDIR: "is a folder, but a file is expected",
    errno.ELOOP: "the link leads back to itself: remove it",
    errno.EBUSY: "it is in use, perhaps as a mount point: unmount it first",
}


def explain_system_error(error: OSError) -> str:
    """Return in one sentence what the system refused and what to do; empty for an error without known advice."""
    if isinstance(error, UnsupportedOperation):  # its text names the file
        return str(error)
    text = _SYSTEM.get(error.errno or 0, "")
    place = str(error.filename or "")
    folder, _, name = place.rpartition("/")
    shown = folder if name.startswith(".part-") else place  # users do not know temporary names
    return f"{shown}: {text}" if text and shown else text
