"""Checks recipes, and the models and data that they name, as far as this machine can, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.cli.stored_run import read_plan
from sparsebp_cli.run import RunFolder

if TYPE_CHECKING:
    from sparsebp_cli.recipe import PlacedRecipe, Recipe

PLAN = "plan.json"
HERE = "local"  # the target kind that runs on this machine


def load_checked(file: Path, changes: Sequence[str]) -> tuple[Recipe, Path, list[str]]:
    """Read a recipe, or the recipe in a ``plan.json``, apply ``--set`` changes, and check its model and data.

    Returns the recipe, the file that its relative paths start from, and a sentence on each thing that cannot be checked
    from this machine. Raises ``RecipeError`` with the place of what is wrong.
    """
    from sparsebp_cli.recipe import load_placed, load_stored

    if file.name != PLAN:
        placed = load_placed(file, changes)
        return placed.recipe, file, _check_sources(placed, file.resolve().parent)
    stored = read_plan(RunFolder(file.parent))
    placed = load_stored(stored["recipe"], str(file), changes)
    # The code is that of the working folder; paths became absolute when the first plan was made.
    origin = Path.cwd() / str(stored.get("provenance", {}).get("recipe_file") or PLAN)
    return placed.recipe, origin, _check_sources(placed, origin.resolve().parent)


def _check_sources(placed: PlacedRecipe, folder: Path) -> list[str]:
    from sparsebp_cli.recipe.composition import has_own_worker
    from sparsebp_cli.source import inspect_sources

    if not has_own_worker(placed.recipe):
        return ["model and data: not checked, because another worker reads them"]
    folders, unknown = list(dict.fromkeys([folder, Path.cwd()])), []
    for found in inspect_sources(placed.recipe, folders, is_here=placed.recipe.target.kind == HERE):
        error = placed.error(found.location, found.text)
        if found.kind == "wrong":
            raise error
        unknown.append(f"{error.key}: {found.text}")
    return unknown
