"""Keys that have no effect beside others: named, because a user who sets one expects something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebp_cli.cli.idle_key import find_idle_keys
from sparsebp_cli.cli.validate import load_checked
from sparsebp_cli.recipe.loader import is_targets_file

from .conftest import Cli

ROOT = Path(__file__).parents[2]
RECIPE = """\
version: 1
model: {name: austen-llama}
dataset: {name: rows.jsonl, eval_split: train}
training: {max_steps: 4}
"""
IDLE = [
    "model.revision=main",
    "dataset.revision=main",
    "dataset.subset=mnli",
    "dataset.eval_fraction=0.3",
    "training.warmup_steps=2 training.lr_scheduler_type=constant",
    "training.weight_decay_of=matrices training.weight_decay=0",
    "training.group_by=length",
    "measure.fidelity_draws=4 measure.fidelity_every=null",
    "checkpoint.stop_at=4",
    "target.image=mine target.kind=slurm",
    "target.mounts=[/srv/a:/srv/a] target.kind=slurm",
]
ELSEWHERE = "target.kind=slurm target.host=ssh://user@cluster target.folder=/shared dataset.eval_split=null"
ACTING = [
    f"dataset.name=/there/data dataset.subset=zh {ELSEWHERE}",  # may be a folder there
    f"model.name=/there/model dataset.name=/there/rows.jsonl {ELSEWHERE}",
    "model.name=none model.revision=main dataset.name=./none dataset.revision=main target.worker=a.worker",
    "dataset.name=cmudict dataset.eval_split=test dataset.format=completion training.group_by=length",
    "dataset.name=folder dataset.eval_split=null dataset.subset=zh dataset.eval_fraction=0.3",
    "training.warmup_steps=2 training.lr_scheduler_type=constant_with_warmup",
    "measure.fidelity_draws=4",
    "checkpoint.stop_at=3",
    "target.image=mine target.mounts=[/srv/a:/srv/a] target.kind=docker",
    "target.image=mine target.mounts=[/srv/a:/srv/a] target.kind=slurm target.container=pyxis",
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for place in (tmp_path, tmp_path / "folder"):
        place.mkdir(exist_ok=True)
        (place / "rows.jsonl").write_text('{"text": "a kind word"}\n' * 1000)
    (tmp_path / "folder" / "README.md").write_text("---\nconfigs:\n- config_name: zh\n  data_files: rows.jsonl\n---\n")
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    return file


def find(recipe: Path, changes: str = "") -> list[str]:
    checked, origin, _ = load_checked(recipe, changes.split())
    return list(find_idle_keys(checked, [origin.parent]))


@pytest.mark.parametrize("changes", IDLE)
def test_a_key_without_effect_is_named_with_its_reason(recipe: Path, changes: str) -> None:
    (found,) = find(recipe, changes)
    assert found.startswith(f"{changes.partition('=')[0]}: ")
    assert " has no effect, because " in found


@pytest.mark.parametrize("changes", ["", *ACTING])
def test_a_key_that_acts_is_not_named(recipe: Path, changes: str) -> None:
    assert find(recipe, changes) == []


def test_run_and_validate_warn_of_a_key_without_effect(recipe: Path, cli: Cli) -> None:
    for verb in (["run", "--dry-run"], ["validate"]):
        done = cli(*verb, recipe, "--set", "model.revision=main", real=True)
        assert done.returncode == 0, done.stderr
        printed = " ".join((done.stdout + done.stderr).split())
        assert "model.revision: 'main' has no effect, because the model is not read from the hub" in printed


def test_no_recipe_that_ships_has_a_key_without_effect() -> None:
    for file in sorted((ROOT / "recipes").rglob("*.yaml")):
        if file.parent.name not in ("papers", "pretrained") and not is_targets_file(file):
            assert find(file) == [], file
