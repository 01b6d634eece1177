"""``sparsebp logs``: what a run did and printed; with ``-f``, the way back to a run that goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.follow import watch
from sparsebp_cli.cli.option import OneRun
from sparsebp_cli.cli.stored import find_one
from sparsebp_cli.cli.submitted import reattach


def logs(
    run: OneRun,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
) -> None:
    """Show a run's progress and what its worker printed. Ctrl-C leaves the run alone."""
    raise typer.Exit(watch(reattach(find_one(run)), follow=follow))
