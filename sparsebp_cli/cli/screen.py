"""Where everything is printed: results on standard output, the rest on standard error.

Much of what is printed was written elsewhere: by a run's worker, by a store, by another machine. So whatever goes
through here has its control characters and marks of writing direction written out, and nothing in it is read as markup
or as the name of an emoji: colours are those of `Text` and of styles alone.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from sparsebp_cli.run.visible import make_visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 100


class Output(StrEnum):
    """How a verb gives its result."""

    TABLE = "table"
    JSON = "json"


def console(*, stderr: bool = False) -> Console:
    """Return where to print: as wide as the terminal, 100 columns where there is none.

    Args:
        stderr: Standard error in place of standard output.

    Returns:
        A console of rich.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return _console_class()(stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def print_line(text: str, *, stderr: bool = False) -> None:
    """Print plain text that is never wrapped: it may go into a pipe.

    Args:
        text: What to print.
        stderr: On standard error.
    """
    print(make_visible(text), file=sys.stderr if stderr else sys.stdout, flush=True)


def print_json(content: Any) -> None:
    """Print JSON for another program.

    Args:
        content: Anything that JSON can hold; other values become text, numbers that are not finite null.
    """
    print_line(json.dumps(_finite(content), indent=2, default=str, ensure_ascii=False, allow_nan=False))


def make_table(*columns: str, numbers: Sequence[str] = (), title: str = "") -> Table:
    """Return an empty table in the house's looks.

    Args:
        *columns: Headings.
        numbers: Headings of the columns that hold numbers, aligned to the right.
        title: Above it.

    Returns:
        A table of rich.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


@cache
def _console_class() -> type[Console]:
    """Return a console of rich that writes out control characters in what it prints; its own commands stay."""
    from rich.console import Console

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=make_visible(segment.text))

    return VisibleConsole


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _finite(child) for key, child in value.items()}
        case list() | tuple():
            return [_finite(child) for child in value]
        case float() if not math.isfinite(value):
            return None
    return value
