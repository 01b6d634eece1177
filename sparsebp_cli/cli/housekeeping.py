"""``sparsebp rm`` and ``prune``: delete runs, or what finished runs no longer need."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.option import RUN_HELP, ManyRuns
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.errors import RunBusyError, UsageError
from sparsebp_cli.run import RunFolder, State, home, list_runs

MOST_NAMED = 10  # runs that the question names


def rm(
    runs: ManyRuns,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs: folder, checkpoints and model, and their record in MLflow, which `mlflow gc` then erases.

    A run that is queued, running, or whose target does not answer is refused, and then nothing is deleted.
    """
    folders = find_all(runs)
    _refuse_alive(folders)
    size = sum(_size(folder.path) for folder in folders)
    if not yes:
        _ask(folders, size)
    _empty_bin()
    for folder in folders:
        _delete(folder)
    print_line(f"{len(folders)} {_runs(folders)} deleted, {show_count(size, 'B')} freed")


def prune(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
) -> None:
    """Delete the checkpoints of finished runs, by default of all. Model, metrics and report data stay.

    Checkpoints hold the optimizer's state beside the weights; only a run that is not finished goes on from them. If a
    finished run has no model, its newest checkpoint stays.
    """
    folders = find_all(runs) if runs else list_runs()[::-1]
    unfinished = [folder for folder in folders if folder.state() is not State.FINISHED]
    if runs and unfinished:
        folder = unfinished[0]
        raise UsageError(f"run {folder.run_id} is {folder.state()}: only finished runs need no checkpoints")
    freed = 0
    for folder in folders:
        places = [] if folder in unfinished else _find_superfluous(folder)
        size = sum(map(_size, places))
        if not size:
            continue
        freed += size
        if not dry_run:
            with _held(folder):
                for place in places:
                    shutil.rmtree(place)
        print_line(f"{folder.run_id} {folder.brief()[0]}: {show_count(size, 'B')}")
    print_line(f"{show_count(freed, 'B')} {'would be ' if dry_run else ''}freed")


def _find_superfluous(folder: RunFolder) -> list[Path]:
    """Return the checkpoints of a finished run that nothing needs."""
    places = sorted((folder.path / "checkpoints").glob("step-*"))
    return places if (folder.path / "model").is_dir() else places[:-1]


def _refuse_alive(folders: Sequence[RunFolder]) -> None:
    for folder in folders:
        state, name = folder.state(), folder.run_id
        if not state.over:
            raise RunBusyError(f"run {name} is {state}: `sparsebp cancel {name}` ends it; nothing was deleted")


def _ask(folders: Sequence[RunFolder], size: int) -> None:
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: give --yes to delete without a question; nothing was deleted")
    for folder in folders[:MOST_NAMED]:
        print_line(f"{folder.run_id} {folder.brief()[0]} ({folder.state()})")
    if len(folders) > MOST_NAMED:
        print_line(f"and {len(folders) - MOST_NAMED} more")
    typer.confirm(f"Delete {len(folders)} {_runs(folders)}, {show_count(size, 'B')}?", abort=True)


def _delete(folder: RunFolder) -> None:
    """Delete one run; it is gone as a whole or there as a whole, whenever this process dies."""
    from sparsebp_cli.tracking import delete_record

    with _held(folder):
        if problem := delete_record(folder):
            print_line(f"warning: {folder.run_id}: its record in MLflow stays: {problem}", stderr=True)
        target = _bin() / folder.run_id
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder.path.rename(target)
    _empty_bin()


@contextmanager
def _held(folder: RunFolder) -> Iterator[None]:
    """Keep others from starting the run; raises RunBusyError if somebody works on it."""
    with folder.lock("target"), folder.lock("worker"):
        yield


def _bin() -> Path:
    """Return where runs lie between their deletion and that of their files; on the file system of the runs."""
    return home() / "deleted"


def _empty_bin() -> None:
    shutil.rmtree(_bin(), ignore_errors=True)


def _size(path: Path) -> int:
    """Return the bytes of the files of a folder; a hard-linked file counts once."""
    found = {(s.st_dev, s.st_ino): s.st_size for file in path.rglob("*") if (s := file.lstat()) and not file.is_dir()}
    return sum(found.values())


def _runs(folders: Sequence[RunFolder]) -> str:
    return "run" if len(folders) == 1 else "runs"
