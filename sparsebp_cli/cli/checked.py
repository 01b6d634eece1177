"""Recipes, checked as far as this machine can tell before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.cli.stored import read_plan
from sparsebp_cli.run import RunFolder

if TYPE_CHECKING:
    from sparsebp_cli.recipe import PlacedRecipe, Recipe

PLAN = "plan.json"
HERE = "local"  # the kind of target that works on this machine


def load_checked(file: Path, changes: Sequence[str]) -> tuple[Recipe, Path, list[str]]:
    """Read a recipe, and inspect the model and the data that it names.

    Args:
        file: A recipe; of a ``plan.json``, the recipe that it keeps.
        changes: ``--set`` options.

    Returns:
        The recipe; the file beside which its paths are looked for; and what cannot be known from here, a sentence each.

    Raises:
        RecipeError: Something is wrong, with its place.
    """
    from sparsebp_cli.recipe import load_placed, load_stored

    if file.name != PLAN:
        placed = load_placed(file, changes)
        return placed.recipe, file, _look(placed, file.resolve().parent)
    stored = read_plan(RunFolder(file.parent))
    placed = load_stored(stored["recipe"], str(file), changes)
    # The code is that of this folder now; paths were made absolute when the first plan was made.
    origin = Path.cwd() / str(stored.get("provenance", {}).get("recipe_file") or PLAN)
    return placed.recipe, origin, _look(placed, origin.resolve().parent)


def _look(placed: PlacedRecipe, folder: Path) -> list[str]:
    from sparsebp_cli.recipe.composition import has_own_worker
    from sparsebp_cli.source import inspect_sources

    if not has_own_worker(placed.recipe):
        return ["model and data: another worker reads them as it likes"]
    folders, unknown = list(dict.fromkeys([folder, Path.cwd()])), []
    for found in inspect_sources(placed.recipe, folders, is_here=placed.recipe.target.kind == HERE):
        error = placed.error(found.location, found.text)
        if found.kind == "wrong":
            raise error
        unknown.append(f"{error.key}: {found.text}")
    return unknown
