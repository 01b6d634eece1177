"""``sparsebp ui``: MLflow's own pages on the store."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from sparsebp_cli.cli.screen import print_line


def ui(port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 5000) -> None:
    """Open MLflow's pages on the tracking store, on this machine only."""
    from sparsebp_cli.tracking import resolve_uri, ui_command, ui_environment

    command = ui_command(resolve_uri(None), port)
    print_line(f"http://127.0.0.1:{port} (Ctrl-C ends it)")
    os.execvpe(command[0], command, os.environ | ui_environment())
