"""Renders a comparison for the terminal, in 100 columns, with rich."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.view import View, view_grids

NARROWEST, GAP = 12, 2


def table(comparison: Comparison, view: View | None = None) -> list[RenderableType]:
    """Return tables, then warnings, then a verdict for each group; for a single view its tables alone."""
    parts: list[RenderableType] = []
    whole = view is None or view.kind == "overview"
    for grid in grids(comparison) if view is None or whole else view_grids(comparison, view):
        parts.append(_Fitting(grid))
        if grid.note:
            parts.append(Text(grid.note, style="dim"))
        parts += map(_Command, grid.commands)
        parts.append(Text())
    if not whole:
        return parts[:-1]
    parts += [Text.assemble(("warning: ", "yellow"), warning) for warning in comparison.warnings]
    parts += [Text.assemble((f"{group.label}: ", "bold"), group.verdict) for group in comparison.groups]
    return parts


class _Command:
    """One line that is never wrapped; not a rich text, because the console joins texts and wraps the whole."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text, no_wrap=True, overflow="ignore")


class _Fitting:
    """A table if its numbers have room; otherwise a list for each row. No number is ever cut."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _draw(self.grid) if _needed(self.grid) <= options.max_width else _stack(self.grid)


def _needed(grid: Grid) -> int:
    """The needed columns of a screen: numbers need all of their width, words can be folded to twelve letters."""
    widths = [max(map(cell_len, column)) for column in zip(grid.columns, *grid.rows, strict=True)]
    return sum(
        min(width, NARROWEST) if grid.has_words(place) else width for place, width in enumerate(widths)
    ) + GAP * (len(widths) - 1)


def _stack(grid: Grid) -> Text:
    lines = [Text(grid.title, style="bold")]
    for first, *rest in grid.rows:
        lines.append(Text(first, style="bold"))
        cells = zip(grid.columns[1:], rest, strict=True)
        lines += [Text.assemble("  ", (f"{column}: ", "dim"), cell) for column, cell in cells if cell]
    return Text("\n").join(lines)


def _draw(grid: Grid) -> Table:
    drawn = Table(title=Text(grid.title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for number, heading in enumerate(grid.columns):
        words = grid.has_words(number)
        drawn.add_column(
            Text(heading),
            justify="left" if words else "right",
            overflow="fold",
            no_wrap=not words,
            header_style="dim",
        )
    for row in grid.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
