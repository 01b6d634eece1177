"""Run folders: location, locks, state, and lookup by id or name.

$SPARSEBP_HOME/runs/RUN_ID/
    plan.json        the worker's only input
    journal.jsonl    all results, from which everything else is derived (see journal.py)
    outline.json     summary of the journal, for lists of runs (see outline.py)
    worker.log       output of the worker
    worker.lock      held by the worker while it lives, whatever its pid
    rank.lock        held by the rank that writes, if the worker started several processes
    target.lock      held by the process that watches the worker
    target.json      which processes these are, and the number of attempts before them
    watcher.log      output of the watching process
    cancelled        exists once a user has asked to cancel the run
    request          request to the process that watches a run elsewhere: stop, kill
    tracking.json    how much of the journal was sent, and to which MLflow run
    labels.json      the tags and the note that a user gave it (see label.py)
    checkpoints/     step-00000050/, ...
    model/           the trained model, as transformers saves it
    best/            the model of the best evaluation, with checkpoint.keep_best
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsebp_cli.errors import RunBusyError, RunNotFoundError, did_you_mean
from sparsebp_cli.run import durable
from sparsebp_cli.run.budget import LARGEST_PLAN, LARGEST_SMALL, read_json
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.run.journal import find_outline
from sparsebp_cli.run.label import Labels
from sparsebp_cli.run.record import State
from sparsebp_cli.run.stored_recipe import rename_keys
from sparsebp_cli.run.visible import mask

if TYPE_CHECKING:
    from filelock import FileLock

Run = TypeVar("Run")
SHORTEST_PREFIX = 3
# Deleting renames a run beside the others: this needs no other file system, new folder or inode. See decision 7.
DELETED = ".deleted-"  # prefix of the name of a run that is being deleted
LOCK_PATIENCE_SECONDS = 0.5  # a process that reads the state briefly holds a shared lock

# Keys of a plan that every reader needs, and their types.
NEEDED: dict[tuple[str, ...], type | tuple[type, ...]] = {
    ("recipe",): dict,
    ("recipe", "name"): str,
    ("recipe", "training", "max_steps"): int,
    ("created",): (int, float),
}
_SIGHTS = {"waiting": State.QUEUED, "working": State.RUNNING}


@dataclass(frozen=True)
class RunFolder:
    """A run on this machine's disk. Its folder's name is the run id."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def trial_file(self) -> Path:
        """Exists if ``run --until-ci`` of 0.5 trained the run."""
        return self.path / "trial.json"

    @property
    def journal_file(self) -> Path:
        return self.path / JOURNAL

    @property
    def log_file(self) -> Path:
        return self.path / "worker.log"

    @property
    def cancel_file(self) -> Path:
        """A file that exists once a user has asked to cancel the run."""
        return self.path / "cancelled"

    @property
    def request_file(self) -> Path:
        """The request to the process that watches a run on another target."""
        return self.path / "request"

    @property
    def target_file(self) -> Path:
        """The file that names the processes working on the run."""
        return self.path / "target.json"

    def is_gone(self) -> bool:
        """Return whether the folder was moved or deleted while a process works on the run."""
        return not self.plan_file.exists()

    def describe_move(self) -> str:
        """Return an explanation that the folder is gone, and how to continue the run."""
        return (
            f"its folder {self.path} was moved or deleted during the run: set SPARSEBP_HOME to the folder that now has "
            f"runs/{self.run_id}, then run `sparsebp resume {self.run_id}`, which continues from the last checkpoint"
        )

    def read_plan(self) -> dict[str, Any]:
        """Return the content of ``plan.json``, not validated against its schema. So runs of other versions and of
        missing plug-ins stay readable. Raise ``RunNotFoundError`` if the file is missing, or a key that every reader
        needs is damaged."""
        try:
            plan: dict[str, Any] = read_json(self.plan_file, LARGEST_PLAN)
            for keys, kind in NEEDED.items():
                value = reduce(getitem, keys, plan)
                if not isinstance(value, kind):
                    raise TypeError(f"{'.'.join(keys)} is {str(value)[:100]!r}")
            plan["recipe"] = rename_keys(plan["recipe"])
            _check_policies(plan["recipe"]["policy"])
            tracking = plan["recipe"].get("tracking") or {}
            if uri := tracking.get("uri"):
                tracking["uri"] = mask(uri)  # plans of earlier versions may hold a password
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, OSError) and (deleted := find_deleted(error)):
                raise RunNotFoundError(deleted) from None
            told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise RunNotFoundError(f"run {self.run_id}: {self.plan_file} is not a plan: {told}") from None
        return plan

    def brief(self) -> tuple[str, float]:
        """Return name and creation time (seconds since 1970), even if other parts of the plan are damaged."""
        try:
            plan = read_json(self.plan_file, LARGEST_PLAN)
            return str(plan["recipe"]["name"]), float(plan["created"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "?", 0.0

    def state(self) -> State:
        """Return the run's state. It is derived from locks and event log, so it is right after a silent death."""
        # See decision 2.
        state = self._recorded_state()
        if state in {State.QUEUED, State.INTERRUPTED} and self.cancel_file.exists():
            return State.CANCELLED
        return state

    def _recorded_state(self) -> State:
        if self.is_locked("worker"):
            return State.RUNNING
        watched = self.is_locked("target")
        before, sight = self._read_launch()
        if sight not in {"", "over"}:  # it runs elsewhere: only the watching process asks the target
            return _SIGHTS.get(sight, State.UNREACHABLE) if watched else State.UNREACHABLE
        found = find_outline(self.path)
        attempts, end = found.attempts, found.end
        if watched and attempts <= (before or 0):
            return State.QUEUED
        if end is not None:
            return end
        # Since the first check a worker may have started, or died before its watcher recorded how.
        if watched or self.is_locked("worker"):
            return State.RUNNING
        return State.INTERRUPTED if attempts or before is not None else State.QUEUED

    def ended(self) -> State | None:
        """Return how the last attempt ended according to the event log; None if it does not say."""
        return find_outline(self.path).end

    def _read_launch(self) -> tuple[int | None, str]:
        """Return the number of attempts before the newest start (None if it never started), and the last state that the
        watching process saw."""
        try:
            launch = read_json(self.target_file, LARGEST_SMALL)
            sight = launch.get("sight")
            if sight is None and self.is_elsewhere():
                raise KeyError("sight")
            return int(launch["after_attempt"]), str(sight or "")
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # An unreadable file may hide a worker that is alive elsewhere; only the target knows.
            return 0, str(State.UNREACHABLE) if self.is_elsewhere() else ""

    def is_elsewhere(self) -> bool:
        """Return whether the plan names a target other than this machine. Return False if the plan cannot be read."""
        try:
            return bool(read_json(self.plan_file, LARGEST_PLAN)["recipe"]["target"]["kind"] != "local")
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return False

    def lock(self, role: str) -> FileLock:
        """Take the lock of a role (``worker``, ``rank`` or ``target``). The system releases it when the process dies.
        Raise RunBusyError if another process holds it."""
        from filelock import FileLock, Timeout  # here: a tenth of the time of ``--help``

        # thread_local=False: a watcher locks in one thread and releases in another.
        lock = FileLock(self.path / f"{role}.lock", thread_local=False)
        try:
            lock.acquire(timeout=LOCK_PATIENCE_SECONDS, poll_interval=0.01)
        except Timeout:
            raise RunBusyError(f"another process is already working on run {self.run_id}") from None
        return lock

    def is_locked(self, role: str) -> bool:
        """Return whether a living process holds the lock of a role."""
        try:
            # Do not use FileLock: it would create a missing file and lock out other readers.
            descriptor = os.open(self.path / f"{role}.lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:  # a shared lock, so that several readers do not block each other
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


def _check_policies(policies: object) -> None:
    """Raise LookupError or TypeError if the policies of a stored recipe are damaged."""
    if not isinstance(policies, list):
        raise TypeError(f"recipe.policy is {str(policies)[:100]!r}")
    for entry in policies:
        if not isinstance(entry["name"], str):
            raise TypeError(f"recipe.policy: a name must be text, got {str(entry['name'])[:100]!r}")


def home() -> Path:
    """Return SparseBP's data folder: ``$SPARSEBP_HOME``, else the user's data folder."""
    chosen = os.environ.get("SPARSEBP_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("sparsebp", appauthor=False)


def is_shared() -> bool:
    """Return whether other users may read a run's files, as far as the umask allows: ``SPARSEBP_SHARED=1``."""
    return os.environ.get("SPARSEBP_SHARED", "") not in {"", "0"}


def keep_private() -> None:
    """Make new files of this process and its children private, unless runs are shared."""
    if not is_shared():
        os.umask(0o077)


def create_run(run_id: str) -> RunFolder:
    """Create the folder of a new run. Only its owner can enter it, unless runs are shared. Raise ``OSError`` if the
    file system has no locks, because the run's state would then be unknown."""
    check_locks(home() / "runs")
    path = home() / "runs" / run_id
    durable.make_folder(path, mode=0o777 if is_shared() else 0o700)
    return RunFolder(path)


def check_locks(folder: Path) -> None:
    """Create the folder and raise ``OSError`` if files in it cannot be locked, as on some network file systems."""
    durable.make_folder(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=durable.PART) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            error.filename = str(folder)
            raise


def list_folders(place: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, without runs that are being deleted."""
    return (plan.parent for plan in place.glob("*/plan.json") if not plan.parent.name.startswith(DELETED))


def list_runs() -> list[RunFolder]:
    """Return every run on this machine, newest first."""
    return list(_name_runs())


def _name_runs() -> dict[RunFolder, str]:
    """Map every run to its name, newest first. Each plan is read once."""
    folders = map(RunFolder, list_folders(home() / "runs"))
    found = {run: run.brief() for run in folders}
    return {run: found[run][0] for run in sorted(found, key=lambda run: (found[run][1], run.run_id), reverse=True)}


def find_deleted(error: OSError) -> str:
    """Return a sentence if the file is missing because its run was deleted; else an empty string."""
    folder = home() / "runs"
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
    if error.errno != errno.ENOENT or not place.is_relative_to(folder) or place == folder:
        return ""
    run = folder / place.relative_to(folder).parts[0]
    return "" if run.exists() else f"run {run.name} was deleted meanwhile"


def is_file(path: Path) -> bool:
    """Return whether the file exists. A user's word may be an invalid file name, for example one of 300 bytes."""
    try:
        return path.is_file()
    except OSError:
        return False


def find_run(word: str) -> list[RunFolder]:
    """Return the runs that a word refers to. It may be an id, a unique prefix of one (3 digits or more), a run's
    folder, a recipe's name (all its runs, oldest first), ``@last`` or ``@N`` (the newest N, oldest first), or ``@TAG``.
    Raise RunNotFoundError if no run matches, or a prefix is not unique."""
    # A word with a slash is never looked up inside the runs folder.
    if word == Path(word).name and is_file(home() / "runs" / word / "plan.json"):
        return [RunFolder(home() / "runs" / word)]
    if not word.startswith("@") and (folder := find_folder(word)) is not None:
        return [folder]
    named = _name_runs()
    return match_word(word, list(named), lambda run: run, lambda run: named[run], str(home()))


def find_folder(word: str) -> RunFolder | None:
    """Return the run whose folder a path names; None if a word is not such a path."""
    return RunFolder(Path(word).absolute()) if os.sep in word and is_file(Path(word) / "plan.json") else None


def match_word(
    word: str, runs: Sequence[Run], folder_of: Callable[[Run], RunFolder], name_of: Callable[[Run], str], place: str
) -> list[Run]:
    """Return those of ``runs``, which are newest first, that a word refers to, as :func:`find_run` does. ``place``
    names the origin of the runs in errors."""
    if word.startswith("@"):
        count = "1" if word == "@last" else word[1:]
        # Tags cannot look like `last`, a number or an id, so they hide none of these. See decision 118.
        if not count.isdecimal() and (
            tagged := [run for run in runs if count in Labels.load(folder_of(run).path).tags]
        ):
            return tagged[::-1]
        if not count.isdecimal() or not 0 < int(count) <= len(runs):
            raise RunNotFoundError(
                f"{word}: there are {len(runs)} runs; use @last or @N with N from 1 to {len(runs)}"
                + ("" if count.isdecimal() else ", or the tag of a run")
            )
        return list(runs[: int(count)])[::-1]
    ids = {folder_of(run).run_id: run for run in runs}
    if word in ids:
        return [ids[word]]
    if same := [run for run in runs if name_of(run) == word]:
        return same[::-1]
    prefixed = [run_id for run_id in ids if len(word) >= SHORTEST_PREFIX and run_id.startswith(word)]
    if len(prefixed) == 1:
        return [ids[prefixed[0]]]
    if prefixed:
        raise RunNotFoundError(f"{word} matches several runs: {', '.join(prefixed[:5])}; give a longer id")
    near = did_you_mean(word, [*ids, *filter(None, map(name_of, runs))])
    advice = "; `sparsebp runs` lists the runs of this machine" if place == str(home()) else ""
    raise RunNotFoundError(f"no run matches {word!r} in {place}{near}{advice}")
