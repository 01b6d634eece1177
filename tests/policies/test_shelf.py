"""Policies that left for the shelf: how one gets them, and that runs and checkpoints of before go on."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebp_cli import entry_point
from sparsebp_cli.errors import PolicyError, RecipeError
from sparsebp_cli.plan import identity
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.policy import find_policies, make_policy
from sparsebp_cli.policy.composition import find_optimizer, list_optimizers
from sparsebp_cli.policy.known_kind import find_kinds
from sparsebp_cli.policy.shelf import MOVED, OPTIMIZERS, REMOVED, REMOVED_OPTIMIZERS, SHELF
from sparsebp_cli.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = {
    policy["name"]: file
    for file in sorted((ROOT / "recipes" / "methods").glob("*.yaml"))
    for policy in yaml.safe_load(file.read_text(encoding="utf-8")).get("policy", [])
    if policy["name"] in MOVED
}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the shelf."""

    def read(group: str, state: object) -> metadata.EntryPoints:
        found = metadata.entry_points(group=group)
        return metadata.EntryPoints(entry for entry in found if entry.dist is None or entry.dist.name != SHELF)

    monkeypatch.setattr(entry_point, "_read", read)


def _recipe(name: str) -> Recipe:
    return load_recipe(RECIPES[name])


def test_what_left_is_on_the_shelf() -> None:
    assert {name for name, found in find_policies().items() if found.source.split()[0] == SHELF} >= MOVED


def test_without_the_shelf_nothing_of_it_is_known(without: None) -> None:
    assert not MOVED & find_policies().keys()
    assert [kind.name for kind in find_kinds().kinds if kind.policy.__module__.startswith("sparsebp_shelf")] == []
    assert find_kinds().problems == ()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_without_the_shelf_says_in_one_line_how_to_get_it(without: None, name: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(RECIPES[name])
    text = str(raised.value)
    assert text.endswith(
        f"policy.0.name: policy {name!r} is not installed: it is in the package sparsebp-shelf: "
        "python -m pip install sparsebp-shelf (in a checkout: ./plugins/sparsebp-shelf)"
    )
    assert text.startswith(f"{RECIPES[name]}:")
    assert "\n" not in text
    with pytest.raises(PolicyError, match="it is in the package sparsebp-shelf"):
        make_policy(name)


def test_a_recipe_with_an_unknown_policy_says_where_more_policies_are(without: None, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    sources = "model: {name: austen-llama}\ndataset: {name: austen}"
    recipe.write_text(f"version: 1\nname: new\n{sources}\npolicy: [{{name: brand-new}}]\n")
    with pytest.raises(RecipeError, match="unknown policy 'brand-new'; installed: ") as raised:
        load_recipe(recipe)
    assert str(raised.value).endswith(
        "; more are in the package sparsebp-shelf: python -m pip install sparsebp-shelf "
        "(in a checkout: ./plugins/sparsebp-shelf)"
    )
    with pytest.raises(PolicyError, match=r"did you mean topk\?$"):
        make_policy("topq")


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_recipe_with_a_removed_policy_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    sources = "model: {name: austen-llama}\ndataset: {name: austen}"
    recipe.write_text(f"version: 1\nname: old\n{sources}\npolicy: [{{name: {name}, keep: 0.5}}]\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe)
    text = str(raised.value)
    assert text.endswith(f"policy.0.name: policy {name!r} was removed after version 0.5: {REMOVED[name]}")
    assert "\n" not in text


def test_what_is_named_in_place_of_a_removed_policy_is_installed() -> None:
    advice = [told.partition(" with ")[0] for told in REMOVED.values() if told.startswith("use ")]
    named = {word for told in advice for word in re.findall(r"[a-z][a-z-]+", told)}
    assert named - {"use", "or"} <= find_policies().keys()
    assert not REMOVED.keys() & find_policies().keys()


def test_the_optimizers_that_left_are_on_the_shelf() -> None:
    assert set(list_optimizers()) >= OPTIMIZERS
    assert {find_optimizer(name).place.partition(".")[0] for name in OPTIMIZERS} == {"sparsebp_shelf"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_without_the_shelf_says_in_one_line_how_to_get_it(
    without: None, name: str, tmp_path: Path
) -> None:
    assert not OPTIMIZERS & set(list_optimizers())
    recipe = tmp_path / "recipe.yaml"
    sources = "model: {name: austen-llama}\ndataset: {name: austen}"
    recipe.write_text(f"version: 1\nname: left\n{sources}\ntraining: {{optim: {name}}}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe)
    text = str(raised.value)
    assert text.endswith(
        f"training.optim: {name!r} is not installed: it is in the package sparsebp-shelf: "
        "python -m pip install sparsebp-shelf (in a checkout: ./plugins/sparsebp-shelf)"
    )
    assert "\n" not in text


@pytest.mark.parametrize("name", REMOVED_OPTIMIZERS)
def test_a_recipe_with_a_removed_optimizer_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    assert name not in list_optimizers()
    recipe = tmp_path / "recipe.yaml"
    sources = "model: {name: austen-llama}\ndataset: {name: austen}"
    recipe.write_text(f"version: 1\nname: old\n{sources}\ntraining: {{optim: {name}}}\n")
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe)
    text = str(raised.value)
    assert text.endswith(f"training.optim: {name!r} was removed after 0.5: {REMOVED_OPTIMIZERS[name]}")
    assert "\n" not in text


def test_with_the_shelf_an_unknown_policy_is_nowhere() -> None:
    with pytest.raises(PolicyError, match="unknown policy 'nowhere-at-all'") as raised:
        make_policy("nowhere-at-all")
    assert SHELF not in str(raised.value)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_checkpoint_of_the_built_in_form_and_its_run_id_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recipe = _recipe(name)
    now = find_code(recipe)
    built_in = {found: replace(policy, source="sparsebp 0.3.0") for found, policy in find_policies().items()}
    monkeypatch.setattr(identity, "find_policies", lambda: built_in)
    then = Seal(recipe.model_dump(mode="json"), find_code(recipe))
    assert then.changes(Seal(recipe.model_dump(mode="json"), now)) == []
    assert identity.identify("group", 0, then.code, {}) == identity.identify("group", 0, now, {})


def test_a_shelf_of_another_version_is_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    name, recipe = min(RECIPES), _recipe(min(RECIPES))
    then: Any = Seal(recipe.model_dump(mode="json"), find_code(recipe))
    other = {found: replace(policy, source=f"{SHELF} 9.0.0") for found, policy in find_policies().items()}
    monkeypatch.setattr(identity, "find_policies", lambda: other)
    changes = then.changes(Seal(recipe.model_dump(mode="json"), find_code(recipe)))
    assert [str(change) for change in changes] == [f'code.{SHELF} (absent, now "9.0.0")'], name
