"""Places in a file, and recipe values with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.error_text import shorten

LONGEST_FILE_NAME = 300


@dataclass(frozen=True)
class Place:
    """A position that an error can name."""

    file: str  # as the user gave it, or --set KEY=VALUE
    line: int = 0  # from 1; 0 if unknown
    column: int = 0  # in characters, from 1; 0 if unknown

    def error(self, text: str, path: Sequence[str | int] | str = ()) -> RecipeError:
        """Return an error at this place. ``path`` holds the keys that lead there, or is their dotted path."""
        key = path if isinstance(path, str) else ".".join(shorten(str(part)) for part in path)
        file = shorten(self.file, LONGEST_FILE_NAME)
        return RecipeError(text, file=file, line=self.line, column=self.column, key=key)


@dataclass(frozen=True)
class Node:
    """A value of a recipe and its place."""

    # a scalar, a list of nodes, or a mapping from text to nodes
    content: dict[str, Node] | list[Node] | str | int | float | bool | None
    place: Place  # of the value
    key_place: Place | None = None  # of its key; None in a list and at the top

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.content, dict):
            return {key: child.plain for key, child in self.content.items()}
        if isinstance(self.content, list):
            return [child.plain for child in self.content]
        return self.content
