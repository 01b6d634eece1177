"""Read the policies of a stored recipe, without validating it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEDULE = "schedule"


def is_dense(recipe: Mapping[str, Any]) -> bool:
    """Return whether a stored recipe trains without a policy."""
    return all(entry["name"] == "dense" for entry in recipe["policy"])


def fold_schedule(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe without ``schedule``, a key of 0.5. Its phases become a policy that is not installed: such
    a run can be shown and compared, but does not go on. Leave a damaged schedule for the next reader to refuse."""
    rest = {key: value for key, value in recipe.items() if key != SCHEDULE}
    if not (phases := recipe.get(SCHEDULE)):
        return rest
    try:
        is_whole = all(isinstance(entry["name"], str) for phase in phases for entry in phase["policy"])
    except (LookupError, TypeError):
        is_whole = False
    return {**rest, "policy": [{"name": SCHEDULE, "phases": phases}]} if is_whole else dict(recipe)
