"""Render a comparison as JSON, as Markdown, or for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from sparsebp_cli.compare.answer import answer_grid
from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.words import say_briefly
from sparsebp_cli.errors import UsageError, did_you_mean

FORMATS = ("json", "md")


def render(
    comparison: Comparison,
    format: str,  # noqa: A002 - the option's own name
    more: Sequence[Grid] = (),
) -> str:
    """Return a comparison as ``json`` (everything, with ``schema``) or ``md``. ``more`` are additional tables of
    ``md``. The text ends with a line break. Raise ``UsageError`` for another format."""
    if format == "json":
        return json.dumps(asdict(comparison), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if format == "md":
        return _to_markdown(comparison, more)
    raise UsageError(f"the format must be one of {', '.join(FORMATS)}, got {format!r}{did_you_mean(format, FORMATS)}")


def _to_markdown(comparison: Comparison, more: Sequence[Grid]) -> str:
    lines: list[str] = []
    for grid in [*grids(comparison), *more]:
        rule = ["---" if number < grid.aside else "--:" for number in range(len(grid.columns))]
        lines += [f"### {_cell(grid.title)}", "", _row(grid.columns), _row(rule)]
        lines += [_row(_embolden(grid, place)) for place in range(len(grid.rows))]
        lines += ["", *([_cell(grid.note), ""] if grid.note else [])]
        lines += ["```console", *(f"$ {command}" for command in grid.commands), "```", ""] if grid.commands else []
    if comparison.warnings:
        lines += ["### Warnings", "", *(f"- {_cell(warning)}" for warning in comparison.warnings), ""]
    lines += [
        "### In words",
        "",
        *(f"- **{_cell(group.label)}**: {_cell(group.verdict)}" for group in comparison.groups),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _embolden(grid: Grid, place: int) -> list[str]:
    return [f"**{cell}**" if (place, column) in grid.bold else cell for column, cell in enumerate(grid.rows[place])]


def _cell(text: str) -> str:
    """Escape only what would break a table or start a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


NARROWEST, GAP = 12, 2


def answer(comparison: Comparison) -> list[RenderableType]:
    """Return a sentence for each group, and one table. The caller knows the remaining space and prints warnings."""
    found = [(group.label, say_briefly(group.label, group.statements)) for group in comparison.groups]
    said = [Text.assemble((f"{label}: ", "bold"), text) for label, text in found]
    return [*said, _Fitting(answer_grid(comparison), is_short=True)]


def table(comparison: Comparison, more: Sequence[Grid] = ()) -> list[RenderableType]:
    """Return tables with the meaning of their columns, then warnings, then a verdict for each group. ``more`` are
    additional tables."""
    parts: list[RenderableType] = []
    for grid in [*grids(comparison), *more]:
        parts.append(_Fitting(grid))
        if grid.note:
            parts.append(Text(grid.note, style="dim"))
        parts += map(_Command, grid.commands)
        parts.append(Text())
    parts += [Text.assemble(("warning: ", "yellow"), warning) for warning in comparison.warnings]
    parts += [Text.assemble((f"{group.label}: ", "bold"), group.verdict) for group in comparison.groups]
    return parts


class _Command:
    """One line that is never wrapped. It is not a rich text, because the console joins texts and wraps the whole."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text, no_wrap=True, overflow="ignore")


class _Fitting:
    """A table if its numbers fit; otherwise a list for each row. Numbers are never cut."""

    def __init__(self, grid: Grid, *, is_short: bool = False) -> None:
        self.grid, self.is_short = grid, is_short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _needed(self.grid) <= options.max_width:
            yield _draw(self.grid, "ellipsis" if self.is_short else "fold")
        else:
            yield _stack(self.grid, ", " if self.is_short else "\n  ")


def _needed(grid: Grid) -> int:
    """Return the screen columns that a table needs: full width for numbers, at most twelve letters for words."""
    widths = [max(map(cell_len, column)) for column in zip(grid.columns, *grid.rows, strict=True)]
    return sum(
        min(width, NARROWEST) if grid.has_words(place) else width for place, width in enumerate(widths)
    ) + GAP * (len(widths) - 1)


def _stack(grid: Grid, between: str) -> Text:
    lines = [Text(grid.title, style="bold")]
    for first, *rest in grid.rows:
        cells = zip(grid.columns[1:], rest, strict=True)
        named = [Text.assemble((f"{column}: ", "dim"), cell) for column, cell in cells if cell]
        lines.append(Text(between).join([Text(first, style="bold"), *named]))
    return Text("\n").join(lines)


def _draw(grid: Grid, overflow: OverflowMethod) -> Table:
    drawn = Table(title=Text(grid.title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for number, heading in enumerate(grid.columns):
        words = grid.has_words(number)
        drawn.add_column(
            Text(heading),
            justify="left" if words else "right",
            overflow=overflow,
            no_wrap=not words,
            header_style="dim",
        )
    for place, row in enumerate(grid.rows):
        drawn.add_row(*(Text(cell, style="bold" if (place, n) in grid.bold else "") for n, cell in enumerate(row)))
    return drawn
