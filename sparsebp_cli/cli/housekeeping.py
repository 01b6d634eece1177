"""``sparsebp rm`` and ``prune``: delete runs, or files that finished runs no longer need."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.run_record import FreedRun, FreedRuns
from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.option import RUN_HELP, Format, ManyRuns
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, can_ask, print_line
from sparsebp_cli.cli.stored_run import ask_target, find_all
from sparsebp_cli.errors import RunBusyError, UsageError
from sparsebp_cli.run import RunFolder, State, durable, home, list_runs, manifest
from sparsebp_cli.run.folder import DELETED

MOST_NAMED = 10  # number of runs that the question names
MOST_ATTEMPTS = 3  # attempts to delete a folder while another process writes into it
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def rm(
    runs: ManyRuns,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Delete runs with their models, and mark their records in MLflow as deleted; `mlflow gc` erases these records.

    If a run is queued or running, or its target does not answer, nothing is deleted.
    """
    folders = find_all(runs)
    for folder in folders:
        ask_target(folder)
    _refuse_alive(folders)
    freed = [FreedRun(run_id=run.run_id, name=run.brief()[0], bytes=_size_alone(run.path)) for run in folders]
    size = sum(one.bytes for one in freed)
    if not yes:
        _ask(folders, size, may_ask=output is Output.TABLE)
    _finish_deletions()
    for folder in folders:
        _delete(folder)
    tell(FreedRuns(runs=freed, bytes=size, is_dry=False), output, _print_deleted)


def _print_deleted(found: FreedRuns) -> None:
    print_line(f"{len(found.runs)} {_runs(found.runs)} deleted, {show_count(found.bytes, 'B')} freed")


def prune(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    output: Format = Output.TABLE,
) -> None:
    """Delete the checkpoints of finished runs (default: all finished runs). Keeps models, metrics and report data.

    Only unfinished runs need their checkpoints, to continue. If the model of a finished run is damaged, the run's
    newest valid checkpoint stays.
    """
    folders = find_all(runs) if runs else list_runs()[::-1]
    unfinished = [folder for folder in folders if folder.state() is not State.FINISHED]
    if runs and unfinished:
        folder = unfinished[0]
        raise UsageError(f"run {folder.run_id} is {folder.state()}: only checkpoints of finished runs can be deleted")
    freed = []
    for folder in folders:
        places = [] if folder in unfinished else _find_superfluous(folder)
        size = sum(map(_size, places))
        if not size:
            continue
        try:
            if not dry_run:
                with _held(folder):
                    for place in places:
                        durable.remove(place)
        except (RunBusyError, OSError) as error:
            if runs:
                raise
            warn(f"{folder.run_id}: its checkpoints were not deleted: {getattr(error, 'strerror', None) or error}")
            continue
        freed.append(FreedRun(run_id=folder.run_id, name=folder.brief()[0], bytes=size))
    tell(FreedRuns(runs=freed, bytes=sum(one.bytes for one in freed), is_dry=dry_run), output, _print_pruned)


def _print_pruned(found: FreedRuns) -> None:
    for one in found.runs:
        print_line(f"{one.run_id} {one.name}: {show_count(one.bytes, 'B')}")
    print_line(f"{show_count(found.bytes, 'B')} {'would be ' if found.is_dry else ''}freed")


def _find_superfluous(folder: RunFolder) -> list[Path]:
    """Return the checkpoints of a finished run that are not needed: all if its model is intact, else all but the newest
    intact one. Without an intact one, return none."""
    places = sorted((folder.path / "checkpoints").glob("step-*"))
    if not places:
        return []
    damage = manifest.find_damage(folder.path / "model")
    if not damage:
        return places
    needed = next((place for place in reversed(places) if not manifest.find_damage(place)), None)
    if (folder.path / "model").is_dir() and damage:
        kept = f"its checkpoint {needed.name} is kept" if needed else "its checkpoints are kept"
        warn(f"{folder.run_id}: its model cannot be verified ({damage}): {kept}")
    return [place for place in places if place != needed] if needed else []


def _refuse_alive(folders: Sequence[RunFolder]) -> None:
    for folder in folders:
        state, name = folder.state(), folder.run_id
        if not state.over and folder.plan_file.exists():  # otherwise another command has just deleted it
            raise RunBusyError(f"run {name} is {state}: first end it by `sparsebp cancel {name}`; nothing was deleted")


def _ask(folders: Sequence[RunFolder], size: int, *, may_ask: bool) -> None:
    if not may_ask or not can_ask():
        raise UsageError("cannot ask for confirmation without a terminal: add --yes to delete; nothing was deleted")
    for folder in folders[:MOST_NAMED]:
        print_line(f"{folder.run_id} {folder.brief()[0]} ({folder.state()})")
    if len(folders) > MOST_NAMED:
        print_line(f"and {len(folders) - MOST_NAMED} more")
    typer.confirm(f"Delete {len(folders)} {_runs(folders)}, {show_count(size, 'B')}?", abort=True)


def _delete(folder: RunFolder) -> None:
    """Delete one run, unless another command already did. If this process dies, the run either exists completely or is
    gone. It is first renamed beside its old path: on the same file system, and without a new folder, which a full disk
    may prevent."""
    gone = folder.path.with_name(f"{DELETED}{folder.run_id}")
    try:
        with _held(folder):
            if folder.plan_file.exists():
                folder.path.rename(gone)
            else:  # deleted between search and lock, which created the folder again
                gone = folder.path
            _destroy(gone)
    except (FileNotFoundError, FileExistsError):  # FileExistsError: the folder vanished while the lock was creating it
        return


def _is_alias(place: Path) -> bool:
    """Return whether a run's folder is only a link to another run beside it."""
    return place.is_symlink() and place.resolve().parent == place.parent.resolve()


def _size_alone(place: Path) -> int:
    return 0 if _is_alias(place) else _size(place)


def _destroy(place: Path) -> None:
    """Delete the MLflow record and then the files of a renamed run. The files name the record, so
    :func:`_finish_deletions` can finish an interrupted deletion."""
    from sparsebp_cli.tracking import delete_record

    if _is_alias(place):
        place.unlink()
        return
    if problem := delete_record(RunFolder(place)):
        name = place.name.removeprefix(DELETED)
        warn(f"{name}: its record in MLflow was not deleted: {problem}")
    # Repeat if another command, which finishes this deletion, has put its lock into the folder meanwhile.
    for _ in range(MOST_ATTEMPTS):
        shutil.rmtree(place.resolve(), ignore_errors=True)  # a run's folder may be a link to another disk
        if not place.exists():
            break
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)  # once more, to raise the error that prevents it


def _finish_deletions() -> None:
    """Finish deletions that an earlier command began. Leave those of living commands to them."""
    for place in (home() / "runs").glob(f"{DELETED}*"):
        # Python reports FileExistsError if the folder vanished while the lock was creating it.
        with suppress(RunBusyError, FileNotFoundError, FileExistsError), _held(RunFolder(place)):
            _destroy(place)


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """Keep others from starting the run. Raise RunBusyError if another process works on it."""
    with ExitStack() as locks:
        for role in ("target", "worker"):
            try:
                locks.enter_context(folder.lock(role))
            except OSError as error:
                # No space for a lock file: then there is no lock, and no process holds it.
                if error.errno not in NO_ROOM or (folder.path / f"{role}.lock").exists():
                    raise
        yield


def _size(path: Path) -> int:
    """Return the size of a folder's files in bytes. A hard-linked file counts once."""
    found: dict[tuple[int, int], int] = {}
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # another command may delete it meanwhile
            about = file.lstat()
            if not stat.S_ISDIR(about.st_mode):
                found[about.st_dev, about.st_ino] = about.st_size
    return sum(found.values())


def _runs(folders: Sequence[object]) -> str:
    return "run" if len(folders) == 1 else "runs"
