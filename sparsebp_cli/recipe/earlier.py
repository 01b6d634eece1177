"""Recipes that runs of earlier versions keep, in the words of this one. What users write now is never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def rename_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with the keys of this version: up to 0.2, ``backward.execution`` was ``engine``."""
    backward = recipe.get("backward")
    if not isinstance(backward, dict) or "engine" not in backward:
        return dict(recipe)
    renamed = {"execution" if key == "engine" else key: value for key, value in backward.items()}
    return {**recipe, "backward": renamed}


def rename_in_plan(content: bytes) -> bytes:
    """Do the same in the JSON of a plan; what is no plan stays as it is, for whoever reads it to refuse."""
    if b'"engine"' not in content:  # nearly always: parsing twice would double the time to list many runs
        return content
    try:
        plan = json.loads(content)
        return json.dumps(plan | {"recipe": rename_keys(plan["recipe"])}).encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return content
