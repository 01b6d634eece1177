"""``sparsebp models`` and ``datasets``: list what recipes can name without a hub."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_tools.answer.fetched_record import AssetLine, AssetList


def models(output: Format = Output.TABLE) -> None:
    """List the models that recipes can use by name: installed, or available through `sparsebp fetch`."""
    from sparsebp_cli.source import MODELS

    tell(AssetList(group="models", assets=describe_assets(MODELS)), output, _print)


def datasets(output: Format = Output.TABLE) -> None:
    """List the datasets that recipes can use by name: installed, or available through `sparsebp fetch`."""
    from sparsebp_cli.source import DATASETS

    tell(AssetList(group="datasets", assets=describe_assets(DATASETS)), output, _print)


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
    from sparsebp_cli.entry_point import entry_points, find_source
    from sparsebp_cli.source.bundled import ABOUT as BUNDLED
    from sparsebp_tools.asset.fetched import describe

    fetched, found = describe(), []  # by value of the entry point
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        line: dict[str, Any] = {"name": entry.name, "where": find_source(entry), "bytes": None}
        line |= {"licence": None, "summary": None}
        if entry.name in BUNDLED and entry.module == "sparsebp_cli.source.bundled":
            licence, summary = BUNDLED[entry.name]
            line |= {"where": "package", "licence": licence, "summary": summary}
        found.append(AssetLine(**line | fetched.get(entry.value, {})))
    return found
