"""Plans from recipes: paths become absolute, because another process, perhaps on another machine, executes the plan."""

from __future__ import annotations

from pathlib import Path

from sparsebp_cli.entry_point import entry_points
from sparsebp_cli.plan.plan import Plan
from sparsebp_cli.plan.provenance import find_provenance
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.source import DATASETS, MODELS, find_path


def make_plan(recipe: Recipe, recipe_file: Path) -> Plan:
    """Make the plan of one run, with a new run id. Relative paths of models and data are resolved against the folder of
    the recipe's file first, then the working folder."""
    folder = recipe_file.resolve().parent
    model, dataset = recipe.model, recipe.dataset
    model = model.model_copy(
        update={
            "name": _absolute(model.name, folder, MODELS),
            "tokenizer": _absolute(model.tokenizer, folder, MODELS),
        }
    )
    dataset = dataset.model_copy(update={"name": _absolute(dataset.name, folder, DATASETS)})
    resolved = recipe.model_copy(update={"model": model, "dataset": dataset})
    return Plan(recipe=resolved, provenance=find_provenance(recipe_file, code_diff=recipe.tracking.code_diff))


def _absolute(name: str | None, folder: Path, group: str) -> str | None:
    if name is None or name.startswith("package:") or name in entry_points(group=group).names:
        return name  # an installed name takes precedence over a folder of the same name
    found = find_path(name, [folder, Path.cwd()])
    return name if found is None else str(found)
