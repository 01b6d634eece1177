"""Compare config fingerprints (seals): recipe, code and data of a checkpoint. A run resumes only if they are unchanged
or the user allows the change.

Checkpoints store the fingerprint, protected by the manifest's checksums. Without a checkpoint, the event log has it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from sparsebp_cli.plan.plan import content_hash
from sparsebp_cli.policy.composition.backward import STORED
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import read
from sparsebp_cli.run.stored_recipe import rename_keys

# These sections say where a run executes and how it is named, not what it trains.
FREE = ("name", "target", "tracking", "checkpoint")
SECTIONS_OF_DATA = ("dataset", "model")
ABSENT = "absent"
LONGEST_VALUE = 60


class SealChange(NamedTuple):
    """A field of a config fingerprint that has changed."""

    field: str  # such as training.seed, code.torch, data
    then: str  # value when the checkpoint was made, as JSON
    now: str  # value now, as JSON

    def __str__(self) -> str:
        return f"{self.field} ({shorten(self.then)}, now {shorten(self.now)})"

    def is_under(self, fields: Collection[str]) -> bool:
        """Return whether the field is one of ``fields``, or below one of them."""
        return any(self.field == field or self.field.startswith(f"{field}.") for field in fields)


@dataclass(frozen=True)
class Seal:
    """The config fingerprint of a run: its recipe, code and data at one moment."""

    recipe: dict[str, object]  # resolved, as JSON
    code: dict[str, str]  # versions of packages that affect results, and our commit if known
    data: str = ""  # digest of all examples; empty until they are read

    def to_json(self) -> dict[str, object]:
        """Return the fingerprint as JSON content."""
        return {"plan": content_hash(self.recipe), "code": self.code, "data": self.data, "recipe": self.recipe}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> Self | None:
        """Return a stored fingerprint; None if the content is not one."""
        recipe, code, data = content.get("recipe"), content.get("code"), content.get("data")
        if not (isinstance(recipe, dict) and isinstance(code, dict) and isinstance(data, str)):
            return None
        return cls(recipe, code, data)

    def changes(self, now: Seal) -> list[SealChange]:
        """Return the fields that differ between this fingerprint and a current one, in the order of the recipe. Compare
        data only if both fingerprints have its digest."""
        both = [_flatten({**_complete(seal.recipe), "code": seal.code}) for seal in (self, now)]
        if self.data and now.data:
            both[0]["data"], both[1]["data"] = json.dumps(self.data), json.dumps(now.data)
        then, current = both
        fields = [*current, *(field for field in then if field not in current)]
        found = (SealChange(field, then.get(field, ABSENT), current.get(field, ABSENT)) for field in fields)
        return [change for change in found if change.then != change.now]


def read_seal(run_folder: Path) -> Seal | None:
    """Return the last fingerprint in a run's event log; None if it has none."""
    last = None
    for record, _ in read(run_folder):
        if record["kind"] == "seal":
            last = Seal.from_json(record["values"])
    return last


def shorten(value: str) -> str:
    """Return a value shortened to fit into a line."""
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."


def is_free(change: SealChange) -> bool:
    """Return whether no number depends on the field."""
    # Of the target's fields, numbers depend only on how many processes share a step. See decision 7.
    return change.is_under(FREE) and not change.is_under(["target.processes"])


def _complete(recipe: dict[str, object]) -> dict[str, object]:
    """Fill in defaults that a later version added, so that a new key does not count as a change."""
    try:
        return Recipe.model_validate(rename_keys(recipe), context=STORED).model_dump(mode="json")
    except ValueError:
        return recipe


def _flatten(content: Mapping[str, object]) -> dict[str, str]:
    return {field: json.dumps(value, sort_keys=True, ensure_ascii=False) for field, value in _leaves(content, "")}


def _leaves(content: object, field: str) -> Iterator[tuple[str, object]]:
    """Yield every value with its dotted name. A key without a value counts as absent."""
    inner: dict[object, object] = {}
    if isinstance(content, Mapping):
        inner = dict(content)
    elif isinstance(content, list) and any(isinstance(item, Mapping) for item in content):
        inner = dict(enumerate(content))
    if not inner and content not in (None, {}):
        yield field, content
    for key, value in inner.items():
        yield from _leaves(value, f"{field}.{key}" if field else str(key))
