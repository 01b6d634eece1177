"""Every recipe of the project goes through the real reader; reading is light."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from tests.plugin import find_ours
from tests.recipe.conftest import SMALL

FOLDER = Path(__file__).parents[2] / "recipes"
STUDIES = sorted(FOLDER.glob("papers/*.yaml"))  # tests/recipe/test_papers.py
RECIPES = sorted(set(FOLDER.rglob("*.yaml")) - set(STUDIES))
# Keys with a default that no recipe which runs everywhere can show, and why. A key that is null by default is optional.
UNSHOWN = {
    "model.peft.type": "named by what follows it: guide, recipes",
    **{
        f"model.lora.use_{name}": "peft's own, of which few people set any: guide, recipes"
        for name in ("dora", "rslora")
    },
    "backward.checkpointing": "of models larger than any that a package brings: guide, memory",
    "training.compile": "needs a compiler",
    "measure.generate.examples": "of models that can answer, which no package brings: guide, chat",
    "measure.generate.max_new_tokens": "as measure.generate.examples",
    "measure.generate.metrics": "as measure.generate.examples",
    "measure.test": "set by studies while they tune",
    "target.kind": "of the reader's machine",
    "target.device": "of the reader's machine",
}


def test_the_quickstart_recipe_is_there() -> None:
    assert (FOLDER / "start" / "quickstart.yaml").is_file()


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_every_recipe_of_the_project_loads(file: Path) -> None:
    assert load_recipe(file).version == 1


def test_every_key_with_a_default_stands_in_a_recipe_or_is_left_out_for_a_reason() -> None:
    texts = [file.read_text(encoding="utf-8") for file in RECIPES]
    shown = {key for text in texts for key in _keys_of(yaml.safe_load(text))}
    assert sorted(set(_list_keys(Recipe)) - shown) == sorted(UNSHOWN)


def test_every_policy_with_a_measured_result_stands_in_a_recipe() -> None:
    """`sparsebp recipes` offers what is worth a run: a reader of a result starts it from there. A policy without one
    needs no recipe, which would show nothing that `sparsebp policies NAME` does not say."""
    shown = {entry.name for file in RECIPES for entry in load_recipe(file).policy}
    classes = {name: found.policy_class for name, found in find_ours().items()}
    cards = {name: policy_class.card for name, policy_class in classes.items() if policy_class is not None}
    measured = {name for name, card in cards.items() if card is not None and card.measured}
    assert len(measured) > 5
    assert not measured - shown


def _list_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that are not null by default, without those of lists and of free mappings."""
    for name, field in model.model_fields.items():
        parts = () if get_origin(field.annotation) is list else get_args(field.annotation)
        inner = [part for part in (field.annotation, *parts) if _is_section(part)]
        if inner:
            yield from _list_keys(inner[0], f"{prefix}{name}.")
        elif field.default is not None:
            yield prefix + name


def _is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _keys_of(tree: object, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from _keys_of(value, f"{prefix}{name}.")


def test_a_recipe_is_checked_without_torch_and_mlflow(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(SMALL + "policy: [{name: topk, keep: 0.5}]\n")
    code = (
        "import sys; from pathlib import Path; from sparsebp_cli.recipe import load_recipe, recipe_schema;"
        "load_recipe(Path(sys.argv[1])); recipe_schema();"
        "print(sorted({'torch', 'mlflow', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
