"""``sparsebp cancel``: stop runs for good."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.option import ManyRuns
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.cli.submission import reattach


def cancel(
    runs: ManyRuns,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time for a last checkpoint; then the worker is killed.")
    ] = 30.0,
) -> None:
    """Stop runs for good, with a last checkpoint. A run that is over stays as it is."""
    for folder in reversed(find_all(runs)):  # the last first, so that a queue starts none in between
        before = folder.state()
        if before.over:
            print_line(f"{folder.run_id} is {before} already")
        else:
            print_line(f"{folder.run_id} {reattach(folder).cancel(grace)}")
