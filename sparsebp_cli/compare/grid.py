"""Define a table of plain text cells."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Names may come from anybody: control characters would control the terminal, direction marks would reverse a line.
UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


def tidy(text: str) -> str:
    """Return a text in one line without control characters or direction marks; it may be a stranger's."""
    return UNSEEN.sub(" ", text)


@dataclass(frozen=True)
class Grid:
    """One table."""

    title: str  # text above the table
    columns: tuple[str, ...]  # headings
    rows: tuple[tuple[str, ...], ...]  # cells, as many as headings
    note: str = ""  # text under the table; empty for none
    aside: int = 1  # number of leading columns with words; the others hold numbers and are right-aligned
    words_last: bool = False  # whether the last column holds words too
    commands: tuple[str, ...] = ()  # commands under the note, never wrapped, so that they can be copied
    bold: frozenset[tuple[int, int]] = frozenset()  # row and column of the cells that a statement shows to be a gain

    def has_words(self, place: int) -> bool:
        """Return whether a column holds words, which may be wrapped; numbers may not."""
        return place < self.aside or (self.words_last and place == len(self.columns) - 1)

    def __post_init__(self) -> None:
        """Remove characters that a terminal would interpret from every cell."""
        object.__setattr__(self, "columns", tuple(map(tidy, self.columns)))
        object.__setattr__(self, "rows", tuple(tuple(map(tidy, row)) for row in self.rows))
