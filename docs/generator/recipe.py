"""The recipe's reference and its JSON schema, from the pydantic models that check every recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from generator.markdown import code, head, table, unwrap
from generator.policy import built_in
from sparsebp_cli.recipe import Recipe, recipe_schema
from sparsebp_cli.recipe.target import FoundTarget, find_targets

TEXT = """This page lists every key that a recipe may have. SparseBP refuses any other, with file, line and column.
[Write a recipe](../guide/recipes.md) explains how to write recipes, extend one by another, and override keys on the
command line. The options of a policy are next to its name: [policies](policies.md). For editors:
[`recipe.schema.json`](../recipe.schema.json), or `sparsebp schema`, which includes the options of installed
plugins."""

BOUNDS = (("exclusiveMinimum", "> "), ("minimum", ">= "), ("exclusiveMaximum", "< "), ("maximum", "<= "))
WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "mapping",
    "array": "list",
    "null": "null",
}


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the reference."""
    full = Recipe.model_json_schema()
    sections = full["$defs"]
    base = (
        "`base`",
        "text",
        "",
        "Path of another recipe, relative to this file. This recipe overrides its keys. It must have no base.",
    )
    parts = [head("Recipe keys", TEXT), "## Top level\n", _table(full, sections, [base])]
    for key, option in full["properties"].items():
        if name := _reference(option):
            parts += _section(key, sections[name], sections)
        if key == "target":
            parts += [part for kind, found in built_in_targets().items() for part in _kind(kind, found)]
    return "\n".join(parts).rstrip("\n") + "\n"


def schema(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the JSON schema, with the options of the built-in policies."""
    return json.dumps(recipe_schema(built_in(), built_in_targets()), indent=2, ensure_ascii=False) + "\n"


def built_in_targets() -> dict[str, FoundTarget]:
    """Return the targets of the distribution ``sparsebp``."""
    return {kind: found for kind, found in find_targets().items() if found.source.split()[0] == "sparsebp"}


def _kind(kind: str, found: FoundTarget) -> list[str]:
    section = found.options_class.model_json_schema()
    return [f"### kind: {kind}\n", unwrap(section.get("description")), "", _table(section, section.get("$defs", {}))]


def describe_range(option: dict[str, Any]) -> str:
    """Return type and range of an option, from its JSON schema, in words."""
    if "anyOf" in option:
        return " or ".join(describe_range(choice) for choice in option["anyOf"])
    if "enum" in option or "const" in option:
        return " or ".join(code(choice) for choice in option.get("enum", [option.get("const")]))
    if "$ref" in option:
        return "mapping"
    bounds = [f"{sign}{option[key]:g}" for key, sign in BOUNDS if key in option]
    word = WORDS.get(str(option.get("type")), "anything")
    if option.get("type") == "array" and option.get("items"):
        word = f"list of {describe_range(option['items'])}"
    return ", ".join([word, *bounds])


def show_default(option: dict[str, Any], *, required: bool) -> str:
    """Return the default of an option from its JSON schema; ``required`` options have none."""
    if required:
        return "required"
    return code(json.dumps(option["default"]).strip('"')) if "default" in option else ""


def _section(key: str, section: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    parts = [f"## {key}\n", unwrap(section.get("description")), "", _table(section, sections)]
    for inner, option in section["properties"].items():
        if name := _reference(option):
            parts += _section(f"{key}.{inner}", sections[name], sections)
    return parts


def _table(
    schema: dict[str, Any], sections: dict[str, Any], rows: list[tuple[str, str, str, str]] | None = None
) -> str:
    required = schema.get("required", ())
    rows = list(rows or [])
    for key, option in schema["properties"].items():
        meaning = option.get("description") or unwrap(sections.get(_reference(option), {}).get("description"))
        if key == "policy":
            allowed, default = "list of policies, or one", code("dense")
        elif _reference(option) and "default" not in option:
            allowed, default = "mapping", "required" if key in required else ""
        else:
            # A recipe without a name gets that of its file.
            stands_in = schema.get("title") == "Recipe" and key == "name"
            allowed, default = describe_range(option), show_default(option, required=key in required)
            default = "the file's name" if stands_in else default
        rows.append((code(key), allowed, default, meaning))
    return table(("key", "value", "default", "meaning"), rows)


def _reference(option: dict[str, Any]) -> str:
    """Return the section that an option refers to, directly or as one of its choices."""
    choices = [option, *option.get("anyOf", []), *option.get("allOf", [])]
    return next((choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice), "")
