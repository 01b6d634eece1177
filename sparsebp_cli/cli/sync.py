"""``sparsebp sync``: send the missing data of runs to the tracking store."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.option import RUN_HELP, complete_run
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.errors import TrackingError, UsageError
from sparsebp_cli.run import list_runs


def sync(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help=RUN_HELP, autocompletion=complete_run)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run of this machine.")] = False,
) -> None:
    """Send runs to MLflow: what was not sent while it was away. Twice changes nothing."""
    if bool(runs) == everything:
        raise UsageError("sync needs runs, or --all for every run")
    from sparsebp_cli.tracking import sync as send

    problems = 0
    for folder in list_runs()[::-1] if everything else find_all(runs or []):
        result = send(folder)
        if result.complete:
            print_line(f"{folder.run_id} {folder.brief()[0]}: {result.points_sent} points sent to {result.uri}")
        else:
            problems += 1
            print_line(f"warning: {folder.run_id}: {result.problem}", stderr=True)
    if problems:
        raise typer.Exit(TrackingError.exit_code)
