"""The recipes of this repository, read by the ordinary loader."""

from __future__ import annotations

from pathlib import Path

from generator.markdown import code, head, table
from sparsebp_cli.recipe import Recipe, load_recipe
from sparsebp_cli.recipe.description import describe_policy
from sparsebp_lab.study.loader import load_study

TEXT = """This page lists the recipes in `recipes/`, which are in the package too: `sparsebp run NAME` runs one, with or
without the name of its folder, and `sparsebp recipes copy NAME` copies it. Each runs without a network. They are
written for two CPU cores. `recipes/study`, `recipes/masked` and `recipes/pretrained` hold the recipes of measured
comparisons; their names need the folder, as in `study/dense`, and those of `pretrained` need `sparsebp fetch` once.
`recipes/papers` holds studies of published tables."""

FOLDERS = {
    "start": "Begin here: the quickstart, a fine-tuning with every gradient, and one with a quarter of the rows.",
    "exact": "The same gradient as dense, for less work or memory, or computed another way.",
    "methods": "One method each, most of them from a publication, with its control where it has one.",
    "training": "Other models and data, and keys that a recipe of your own may need.",
}

PAPERS = """Tables of publications as [studies](../guide/study.md#repeat-a-published-table): `sparsebp study
papers/NAME` needs a hub and a GPU, with `--scaled` neither. Their comments say where each setting is from, and which
numbers could not be verified. [What each needs on an H100](../results/papers.md)."""


def page(root: Path) -> str:
    """Return the page."""
    columns = ("recipe", "what", "model", "data", "policy", "steps")
    parts = [head("Shipped recipes", TEXT)]
    for folder, text in FOLDERS.items():
        rows = [_row(file, load_recipe(file)) for file in sorted((root / "recipes" / folder).glob("*.yaml"))]
        parts += [f"## `recipes/{folder}`\n", f"{text}\n", table(columns, rows)]
    studies = [_study_row(file) for file in sorted((root / "recipes" / "papers").glob("*.yaml"))]
    columns = ("study", "what", "model", "data", "arms", "steps", "claims")
    return "\n".join([*parts, "## `recipes/papers`\n", f"{PAPERS}\n", table(columns, studies)])


def _study_row(file: Path) -> tuple[str, ...]:
    loaded = load_study(file)
    recipe, paper = next(iter(loaded.firsts.values())).recipe, loaded.paper
    assert paper is not None
    model = code(recipe.model.name) if recipe.model.name else f"random {(recipe.model.config or {})['model_type']}"
    data = " ".join(map(code, filter(None, (recipe.dataset.name, recipe.dataset.subset))))
    arms = ", ".join(map(code, loaded.study.arms))
    what = f"{_comment(file)} [{paper.title}]({paper.link})"
    return code(file.name), what, model, data, arms, str(recipe.training.max_steps), str(len(paper.claims))


def _row(file: Path, recipe: Recipe) -> tuple[str, ...]:
    model = code(recipe.model.name) if recipe.model.name else f"random {(recipe.model.config or {})['model_type']}"
    model += " with LoRA" if recipe.model.lora else ""
    policies = [describe_policy({"name": entry.name, **entry.options}) for entry in recipe.policy]
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
