"""One table as plain text cells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """One table.

    Args:
        title: Above it.
        columns: Headings.
        rows: Cells, as many as headings.
        note: Under it; empty for none.
        aside: How many columns, from the left, hold words: the others hold numbers and are aligned right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    aside: int = 1
