"""Restores a recipe from the parameters that a store has of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def unflatten(params: Mapping[str, str]) -> dict[str, Any]:
    """Return a recipe from the dotted parameters that ``tracking`` sent; a text that looks like a number becomes
    one.
    """
    root: dict[str, Any] = {}
    for path, text in params.items():
        *parents, last = path.split(".")
        place = root
        for part in parents:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                break
            place = below
        place[last] = _value(text)
    found = _lists(root)
    return found if isinstance(found, dict) else {}


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    children = {key: _lists(child) for key, child in value.items()}
    if children and all(key.isdecimal() for key in children):
        return [children[key] for key in sorted(children, key=int)]
    return children
