"""The JSON Schema accepts what the loader accepts, and the committed copy is the one the code makes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import find_policies
from sparsebp_cli.recipe import Recipe, recipe_schema
from sparsebp_cli.recipe.document import read_document
from sparsebp_cli.recipe.target import find_targets
from tests.recipe.conftest import SMALL
from tests.recipe.schema_evaluator import accepts

Read = Callable[..., Recipe]
Install = Callable[..., None]

COMMITTED = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
VALUES: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    0.5,
    1.5,
    10**9,
    "",
    "a b",
    "local",
    "rows",
    "dense",
    [],
    ["a"],
    [3],
    {},
    {"name": "dense"},
]


def make_built_in_schema() -> dict[str, Any]:
    own = {
        name: policy
        for name, policy in find_policies().items()
        if policy.policy_class and policy.policy_class.__module__.startswith(("sparsebp_cli.", "sparsebp_shelf."))
    }
    targets = {kind: found for kind, found in find_targets().items() if found.source.split()[0] == "sparsebp"}
    return recipe_schema(own, targets)


def fill_in(recipe: Recipe) -> dict[str, Any]:
    """Every key of a recipe, with a value that is allowed."""
    content: dict[str, Any] = recipe.model_dump(mode="json")
    for entry in content["policy"]:  # plans have options of older versions, which a recipe needs no more
        for name, _ in find_policies()[entry["name"]].policy_class.former_options:
            del entry[name]
    content["model"]["lora"] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
    return content


def walk(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, child in pairs:
        yield from walk(child, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def loads(read: Read, content: Any) -> bool:
    try:
        read(json.dumps(content))
    except UsageError:
        return False
    return True


def test_the_committed_schema_is_the_one_the_code_makes() -> None:
    assert COMMITTED.read_text() == json.dumps(make_built_in_schema(), indent=2) + "\n", (
        "write it anew: sparsebp schema > docs/recipe.schema.json, with no plugin but the shelf installed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("section", Recipe.model_fields)
def test_schema_and_loader_agree_on_every_key_with_every_kind_of_value(read: Read, section: str) -> None:
    schema = recipe_schema()
    content = fill_in(read(SMALL + "policy: [{name: random, keep: 0.5}]\n"))
    assert accepts(schema, content)
    assert loads(read, content)
    both_ways = {True: 0, False: 0}
    for path in walk(content):
        # Beyond the schema: that either name or config is given, what goes together, which optimizers are installed.
        beyond = {("model", "config"), ("model", "name"), ("training", "optim"), ("training", "optim_args")}
        beyond |= {("target", "nodes"), ("tracking", "uri")}  # which stores work
        beyond |= {("dataset", key) for key in ("columns", "chat_template", "train_on")}  # of some formats
        beyond |= {("checkpoint", "keep_best"), ("measure", "metric"), ("measure", "generate")}  # what is measured
        beyond |= {("model", "peft"), ("model", "adapter")}  # one of them and lora
        later = ("num_train_epochs", "early_stopping_patience", "lr_scheduler_kwargs")  # beside max_steps, of some
        beyond |= {("training", key) for key in later}
        beyond |= {("model", "attention")}  # which kernels there are
        if path[0] != section:
            continue
        if path[:2] in beyond or path == ("model",):
            continue
        for value in VALUES:
            changed = put(content, path, value)
            loaded = loads(read, changed)
            assert accepts(schema, changed) == loaded, (path, value)
            both_ways[loaded] += 1
    assert min(both_ways.values()) >= 1


@pytest.mark.parametrize("path", [(), ("model",), ("model", "lora"), ("policy", 0), ("training",), ("target",)])
def test_schema_and_loader_refuse_an_unknown_key(read: Read, path: tuple[Any, ...]) -> None:
    content = put(fill_in(read(SMALL + "policy: [{name: topk, keep: 1}]")), (*path, "kepe"), 1)
    assert not accepts(recipe_schema(), content)
    assert not loads(read, content)


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nmodel: {name: x}",
        "version: 1\ndataset: {name: x}",
        "model: {name: x}\ndataset: {name: x}",
        "version: 1\nmodel: {name: x}\ndataset: {split: x}",
        SMALL + "policy: topk",
        SMALL + "policy: {name: topk}",
        SMALL + "policy: [{keep: 1}]",
        SMALL + "policy: [{name: tokp, keep: 1}]",
        SMALL + "base: 3",
        SMALL + "target: lokal",
    ],
)
def test_schema_and_loader_refuse_together(read: Read, text: str) -> None:
    node = read_document(text, "r.yaml")
    assert node is not None
    assert not accepts(recipe_schema(), node.plain)
    with pytest.raises(UsageError):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "base: b.yaml",
        "base: b.yaml\ndataset: {split: x}\nmodel: {dtype: bfloat16}",
        SMALL + "policy: [dense]\ntarget: local",
    ],
)
def test_schema_and_loader_accept_a_base_and_short_forms(read: Read, text: str) -> None:
    Path("b.yaml").write_text(SMALL)
    node = read_document(text, "r.yaml")
    assert node is not None
    assert accepts(recipe_schema(), node.plain)
    read(text)


def test_the_schema_has_options_of_installed_plugins_but_not_of_broken_ones(install: Install) -> None:
    install("half-plugin", {"half:2/4": "Half", "bad": "Unfinished"})
    schema = recipe_schema()
    content = {"version": 1, "model": {"name": "x"}, "dataset": {"name": "x"}}
    assert accepts(schema, {**content, "policy": [{"name": "half:2/4", "keep": 0.1, "mode": "far"}]})
    assert accepts(schema, {**content, "policy": "half:2/4"})
    assert not accepts(schema, {**content, "policy": [{"name": "half:2/4", "keep": 0.6}]})
    assert not accepts(schema, {**content, "policy": [{"name": "half:2/4", "kepe": 0.1}]})
    assert not accepts(schema, {**content, "policy": "bad"})


def test_every_key_is_described() -> None:
    schema = make_built_in_schema()
    for place, part in {"": schema, **schema["$defs"]}.items():
        for key, inner in part.get("properties", {}).items():
            if not (place.startswith("policy.") and key == "name"):
                assert "description" in inner or "$ref" in inner, (place, key)
