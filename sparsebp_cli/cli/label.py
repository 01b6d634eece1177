"""``sparsebp tag``: add tags and notes to runs. Plan and event log do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.run_record import Labelled, LabelList
from sparsebp_cli.cli.option import Format, ManyRuns
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder, home
from sparsebp_cli.run.label import Labels, check_tag


def tag(
    runs: ManyRuns,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the tag: a letter, then letters, digits, _ . or -.")
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag from these runs.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Give runs a tag. Select them later as `@NAME` in every command, or by --where tag=NAME."""
    check_tag(name)
    if not remove and (home() / "studies" / f"{name}.json").is_file():
        raise UsageError(f"a study has the name {name}, and `compare @{name}` shows the study: choose another tag")
    folders = find_all(runs)
    for folder in folders:
        _change(folder, lambda old: replace(old, tags=tuple(sorted({*old.tags, name} - ({name} if remove else set())))))
    tell(_describe(folders), output, lambda found: _print_tagged(found, name, is_removed=remove))


def _print_tagged(found: LabelList, name: str, *, is_removed: bool) -> None:
    count = "1 run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
    print_line(f"{count} without the tag {name}" if is_removed else f"{count} tagged: @{name}")


def _describe(folders: Sequence[RunFolder]) -> LabelList:
    labels = [(folder.run_id, Labels.load(folder.path)) for folder in folders]
    return LabelList(runs=[Labelled(run_id=run_id, tags=list(has.tags), note=has.note) for run_id, has in labels])


def _change(folder: RunFolder, change: Callable[[Labels], Labels]) -> None:
    """Change the labels of a run here and, if the run is over and was sent there, in MLflow. A run that is alive sends
    its labels itself, at the latest when it ends."""
    # Otherwise two commands could both read before either writes.
    with folder.lock("labels"):
        change(Labels.load(folder.path)).save(folder.path)
    if (folder.path / "tracking.json").exists() and folder.state().over:
        from sparsebp_cli.tracking import sync

        if problem := sync(folder).problem:
            warn(f"{folder.run_id}: the change was not sent to MLflow: {problem}")
