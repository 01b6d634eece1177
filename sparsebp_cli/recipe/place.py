"""Where something stands in a file, and values that remember it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.policy.phrase import shorten

LONGEST_FILE_NAME = 300


@dataclass(frozen=True)
class Place:
    """A position that an error can name.

    Args:
        file: As the user gave it, or ``--set KEY=VALUE``.
        line: Counted from 1; 0 when there is none.
        column: In characters, counted from 1; 0 when there is none.
    """

    file: str
    line: int = 0
    column: int = 0

    def error(self, text: str, path: Sequence[str | int] | str = ()) -> RecipeError:
        """Return an error at this place.

        Args:
            text: What is wrong, the value got, what is allowed.
            path: The keys that lead there, or their dotted path.

        Returns:
            The error, to be raised.
        """
        key = path if isinstance(path, str) else ".".join(shorten(str(part)) for part in path)
        file = shorten(self.file, LONGEST_FILE_NAME)
        return RecipeError(text, file=file, line=self.line, column=self.column, key=key)


@dataclass(frozen=True)
class Node:
    """A value of a recipe, and where it stands.

    Args:
        content: A scalar, a list of nodes, or a mapping from text to nodes.
        place: Where the value starts.
        key_place: Where its key starts; None in a list and at the top.
    """

    content: dict[str, Node] | list[Node] | str | int | float | bool | None
    place: Place
    key_place: Place | None = None

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.content, dict):
            return {key: child.plain for key, child in self.content.items()}
        if isinstance(self.content, list):
            return [child.plain for child in self.content]
        return self.content
