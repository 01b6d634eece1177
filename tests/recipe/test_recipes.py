"""Every recipe of the project goes through the real reader; reading is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.recipe import load_recipe
from tests.recipe.conftest import SMALL

FOLDER = Path(__file__).parents[2] / "recipes"


def test_the_quickstart_recipe_is_there() -> None:
    assert (FOLDER / "quickstart.yaml").is_file()


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: file.name)
def test_every_recipe_of_the_project_loads(file: Path) -> None:
    assert load_recipe(file).version == 1


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
