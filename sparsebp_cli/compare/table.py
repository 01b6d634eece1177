"""A comparison for the terminal, in 100 columns: rich renderables, which the command line prints."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.view import View, view_grids


def table(comparison: Comparison, view: View | None = None) -> list[RenderableType]:
    """Return what is printed, from top to bottom.

    Args:
        comparison: What was compared.
        view: What of it; None: everything.

    Returns:
        Tables, then warnings, then a verdict for each group; of a single view its tables alone.
    """
    parts: list[RenderableType] = []
    whole = view is None or view.kind == "overview"
    for grid in grids(comparison) if view is None or whole else view_grids(comparison, view):
        parts.append(_draw(grid))
        if grid.note:
            parts.append(Text(grid.note, style="dim"))
        parts.append(Text())
    if not whole:
        return parts[:-1]
    parts += [Text.assemble(("warning: ", "yellow"), warning) for warning in comparison.warnings]
    parts += [Text.assemble((f"{group.label}: ", "bold"), group.verdict) for group in comparison.groups]
    return parts


def _draw(grid: Grid) -> Table:
    drawn = Table(title=escape(grid.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, heading in enumerate(grid.columns):
        words = number < grid.aside
        drawn.add_column(
            escape(heading),
            justify="left" if words else "right",
            overflow="fold",
            no_wrap=not words,
            header_style="dim",
        )
    for row in grid.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
