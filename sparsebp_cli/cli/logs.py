"""``sparsebp logs``: the progress and output of a run; with ``-f``, until it is over."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.follow import watch
from sparsebp_cli.cli.option import OneRun
from sparsebp_cli.cli.stored_run import find_one
from sparsebp_cli.cli.submission import reattach


def logs(
    run: OneRun,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
) -> None:
    """Show a run's progress and what its worker printed. Ctrl-C leaves the run alone."""
    raise typer.Exit(watch(reattach(find_one(run)), follow=follow))
