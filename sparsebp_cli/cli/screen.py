"""Print everything: results on standard output, the rest on standard error.

Many texts come from elsewhere: a run's worker, a store, another machine. So control characters and marks of writing
direction are escaped in everything that is printed here. No text is read as markup or as the name of an emoji; only
`Text` and styles set colours.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, TextIO

from sparsebp_cli.run.visible import make_visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

    from sparsebp_cli.errors import SparseBPError

WIDTH_WITHOUT_TERMINAL = 100
MOST_LINES = 24  # of an answer


class Output(StrEnum):
    """Output formats of most commands."""

    TABLE = "table"
    JSON = "json"


def console(*, stderr: bool = False) -> Console:
    """Return a console of rich, as wide as the terminal, or 100 columns without one."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return _console_class()(stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def can_ask() -> bool:
    """Return whether a person can answer at standard input, which may be closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def print_line(text: str, *, stderr: bool = False) -> None:
    """Print plain text that is never wrapped, because it may go into a pipe."""
    print(make_visible(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def print_error(error: SparseBPError) -> None:
    """Print an error to standard error: one line, or for a recipe one line per problem."""
    for one in (error, *getattr(error, "others", ())):
        print_line(f"error: {' '.join(str(one).split())}", stderr=True)


def print_json(content: object, stream: TextIO | None = None) -> None:
    """Print JSON for another program, by default to standard output. Unknown values become text, numbers that are not
    finite become null."""
    text = json.dumps(_finite(content), indent=2, default=str, ensure_ascii=False, allow_nan=False)
    print(make_visible(text), file=stream or sys.stdout, flush=True)


def print_screenful(parts: Sequence[RenderableType], notes: Sequence[str], rest: str) -> None:
    """Print parts, as many of the notes as fit a screen, and ``rest``, which begins with ``more:`` and says how to see
    the others. Parts that are plain strings are not wrapped, because they may contain commands to copy."""
    from rich.text import Text

    screen = console()

    def count(part: RenderableType) -> int:
        return len(screen.render_lines(part, pad=False))

    room, left = MOST_LINES - sum(map(count, [*parts, Text(rest)])), 0
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, str))
    for note in notes:
        if (lines := count(Text(note))) > room:
            left += 1
            continue
        room -= lines
        level, colon, text = note.partition(": ")
        screen.print(Text.assemble((level + colon, "yellow" if level == "warning" else ""), text))
    screen.print(f"and {left} {rest}" if left else rest)


def make_table(*columns: str, numbers: Sequence[str] = (), title: str = "") -> Table:
    """Return an empty table with these headings. Columns named in ``numbers`` are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


@cache
def _console_class() -> type[Console]:
    """Return a console class of rich that escapes control characters in texts, but not in rich's own commands."""
    from rich.console import Console

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=make_visible(segment.text))

    return VisibleConsole


def _finite(value: object) -> object:
    match value:
        case dict():
            return {str(key): _finite(child) for key, child in value.items()}
        case list() | tuple():
            return [_finite(child) for child in value]
        case float() if not math.isfinite(value):
            return None
    return value
