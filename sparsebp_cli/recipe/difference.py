"""Differences between two recipes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparsebp_cli.recipe.schema import Recipe


def describe_changes(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """Return dotted path, value in a and value in b for each difference, in the schema's order; None stands for a
    missing key."""
    left, right = (dict(_flatten(recipe.model_dump(mode="json"))) for recipe in (a, b))
    paths = dict.fromkeys([*left, *right])
    order = list(Recipe.model_fields)
    changed = [path for path in paths if left.get(path) != right.get(path)]
    changed.sort(key=lambda path: order.index(path.split(".")[0]))
    return [(path, left.get(path), right.get(path)) for path in changed]


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in pairs:
            yield from _flatten(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
