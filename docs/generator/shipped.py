"""The recipes of this repository, read by the ordinary loader."""

from __future__ import annotations

from pathlib import Path

from generator.markdown import code, head, table
from sparsebp_cli.recipe import Recipe, load_recipe

TEXT = """This page lists the recipes in `recipes/`, which are in the package too: `sparsebp recipes copy NAME` copies
one. Each runs without a network. They are written for two CPU cores."""


def page(root: Path) -> str:
    """Return the page."""
    files = sorted((root / "recipes").glob("*.yaml"))
    rows = [_row(file, load_recipe(file)) for file in files]
    columns = ("recipe", "what", "model", "data", "policy", "steps")
    return "\n".join([head("Shipped recipes", TEXT), table(columns, rows)])


def _row(file: Path, recipe: Recipe) -> tuple[str, ...]:
    model = code(recipe.model.name) if recipe.model.name else f"random {(recipe.model.config or {})['model_type']}"
    model += " with LoRA" if recipe.model.lora else ""
    policies = [
        " ".join([entry.name, *(f"{key}={value}" for key, value in entry.options.items() if value is not None)])
        for entry in recipe.policy
    ]
    data = f"{code(recipe.dataset.name)}, {recipe.dataset.format}"
    return code(file.name), _comment(file), model, data, ", ".join(map(code, policies)), str(recipe.training.max_steps)


def _comment(file: Path) -> str:
    """Return the comment at the beginning of a recipe, which describes its purpose."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "$schema" not in line:
            lines.append(line.lstrip("# "))
    return " ".join(lines)
