"""``sparsebp compare``: runs side by side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sparsebp_cli.cli.option import ManyRuns
from sparsebp_cli.cli.screen import console, print_line
from sparsebp_cli.cli.stored import find_all


class Form(StrEnum):
    """How a comparison is given."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


def compare(
    runs: ManyRuns,
    output: Annotated[Form, typer.Option("-o", "--output", help="How the comparison is given.")] = Form.TABLE,
    metric: Annotated[
        str | None, typer.Option(help="The metric that says how good a model is. [default: eval/loss]")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN", help="What the others are held against. [default: the exact policy]")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it (.png, .svg, .pdf).")] = None,
) -> None:
    """Compare runs: quality, step time, memory, with the differences of their recipes first."""
    from sparsebp_cli.compare import compare_runs, picture, render, table

    comparison = compare_runs(find_all(runs), baseline=baseline, metric=metric)
    drawn = picture(comparison, png) if png is not None else None  # first, for it may be refused
    if output is Form.TABLE:
        console().print(*table(comparison), sep="\n")
    else:
        print_line(render(comparison, output.value).rstrip("\n"))
    if drawn is not None:
        print_line(f"picture: {drawn}", stderr=True)
