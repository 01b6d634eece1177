"""``sparsebp tag`` and ``note``: what people write on runs afterwards. Plan and journal stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from sparsebp_cli.cli.option import ManyRuns, OneRun
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored_run import find_all, find_one
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder, home
from sparsebp_cli.run.label import Labels, check_tag, make_note


def tag(
    runs: ManyRuns,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A letter, then letters, digits, _ . or -.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
) -> None:
    """Give runs a tag, by which `@NAME` names them in every command, and `tag=NAME` in --where."""
    check_tag(name)
    if not remove and (home() / "studies" / f"{name}.json").is_file():
        raise UsageError(f"@{name} is the study {name} in `compare`: choose another tag")
    folders = find_all(runs)
    for folder in folders:
        _change(folder, lambda old: replace(old, tags=tuple(sorted({*old.tags, name} - ({name} if remove else set())))))
    count = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    print_line(f"{count} without the tag {name}" if remove else f"{count} tagged: @{name}")


def note(
    run: OneRun,
    text: Annotated[str, typer.Argument(metavar="NOTE", help='One line; "" takes the note away.')],
) -> None:
    """Write a note on a run, in place of the one that it has. `show` and `runs --columns note` show it."""
    line, folder = make_note(text), find_one(run)
    _change(folder, lambda old: replace(old, note=line))
    print_line(f"{folder.run_id}: {line}" if line else f"{folder.run_id} has no note")


def _change(folder: RunFolder, change: Callable[[Labels], Labels]) -> None:
    """Change the labels of a run here and, if the run is over and was sent there, in MLflow. A run that is alive sends
    its labels itself, at the latest when it ends."""
    # Else two commands could both read before either writes.
    with folder.lock("labels"):
        change(Labels.load(folder.path)).save(folder.path)
    if (folder.path / "tracking.json").exists() and folder.state().over:
        from sparsebp_cli.tracking import sync

        if problem := sync(folder).problem:
            print_line(f"warning: {folder.run_id}: MLflow does not have it: {problem}", stderr=True)
