"""What a checkpoint was made under: recipe, code and data. A run goes on under nothing else, unless somebody allows it.

The seal lies inside each checkpoint, where the manifest's checksums cover it, and in the journal for a run that has no
checkpoint yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.recipe.earlier import rename_keys
from sparsebp_cli.recipe.schema import Recipe

# These say where and how a run is carried out and what it is called, not what is trained.
FREE = ("name", "target", "tracking", "checkpoint")
SECTIONS_OF_DATA = ("dataset", "model")
ABSENT = "absent"
LONGEST_VALUE = 60


class Change(NamedTuple):
    """A field that is not as it was.

    Args:
        field: ``training.seed``, ``code.torch``, ``data``.
        then: Its value when the checkpoint was made, as JSON.
        now: Its value now.
    """

    field: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} ({shorten(self.then)}, now {shorten(self.now)})"

    def is_under(self, fields: Collection[str]) -> bool:
        """Whether one of these is the field, or a section that it is in."""
        return any(self.field == field or self.field.startswith(f"{field}.") for field in fields)


@dataclass(frozen=True)
class Seal:
    """Recipe, code and data of one moment of a run.

    Args:
        recipe: Resolved, as JSON.
        code: Versions of the packages that decide what is computed, and the commit of ours where it is known.
        data: Digest of all examples; empty until they were read.
    """

    recipe: dict[str, Any]
    code: dict[str, str]
    data: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the seal for a file."""
        return {"plan": content_hash(self.recipe), "code": self.code, "data": self.data, "recipe": self.recipe}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self | None:
        """Return a seal that was kept; None when it is none."""
        recipe, code, data = content.get("recipe"), content.get("code"), content.get("data")
        if not (isinstance(recipe, dict) and isinstance(code, dict) and isinstance(data, str)):
            return None
        return cls(recipe, code, data)

    def changes(self, now: Seal) -> list[Change]:
        """Return what is not as it was.

        Args:
            now: The seal of this moment. Data that either of the two does not know is not compared.

        Returns:
            The fields, in the order of the recipe.
        """
        both = [_flatten({**_complete(seal.recipe), "code": seal.code}) for seal in (self, now)]
        if self.data and now.data:
            both[0]["data"], both[1]["data"] = json.dumps(self.data), json.dumps(now.data)
        then, current = both
        fields = [*current, *(field for field in then if field not in current)]
        found = (Change(field, then.get(field, ABSENT), current.get(field, ABSENT)) for field in fields)
        return [change for change in found if change.then != change.now]


def shorten(value: str) -> str:
    """Return a value that fits into a line."""
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."


def is_free(change: Change) -> bool:
    """Whether a field may change without any number depending on it."""
    return change.is_under(FREE) and not change.is_under(["target.processes"])


def _complete(recipe: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a later version has a default for, so that a new key is no change."""
    try:
        return Recipe.model_validate(rename_keys(recipe)).model_dump(mode="json")
    except ValueError:
        return recipe


def _flatten(content: Mapping[str, Any]) -> dict[str, str]:
    return {field: json.dumps(value, sort_keys=True) for field, value in _leaves(content, "")}


def _leaves(content: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Yield every value by its dotted name. A key without a value is as good as none."""
    inner: dict[Any, Any] = {}
    if isinstance(content, Mapping):
        inner = dict(content)
    elif isinstance(content, list) and any(isinstance(item, Mapping) for item in content):
        inner = dict(enumerate(content))
    if not inner and content not in (None, {}):
        yield field, content
    for key, value in inner.items():
        yield from _leaves(value, f"{field}.{key}" if field else str(key))
