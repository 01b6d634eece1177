"""What a recipe's eager update and its clipping need of each other, over two sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp_cli.policy.finding import Finding
from sparsebp_cli.recipe.schema import Recipe


def find_eager(recipe: Recipe, data: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong.

    Args:
        recipe: Each section of which is right by itself.
        data: As the user wrote it: an error stands where something was written.

    Returns:
        At most one finding.
    """
    backward, max_norm = recipe.backward, recipe.training.max_grad_norm
    if backward.update != "eager":
        return []
    if backward.eager_clip is None and max_norm is not None:
        written = "" if "max_grad_norm" in data.get("training", {}) else ", the default"
        text = (
            "eager needs backward.eager_clip: parameter, previous or exact, by which training.max_grad_norm: "
            f"{max_norm}{written} can clip; or max_grad_norm: null"
        )
        return [Finding(("backward", "update"), text)]
    if backward.eager_clip is not None and max_norm is None:
        return [Finding(("backward", "eager_clip"), "clips nothing: training.max_grad_norm is null")]
    return []
