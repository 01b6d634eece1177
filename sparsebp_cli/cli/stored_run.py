"""Reads a run's folder without the schema, so that old runs and options of missing plugins stay readable."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from sparsebp_cli.errors import PolicyError, RunNotFoundError
from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.run import RunFolder, find_run
from sparsebp_cli.run.visible import mask


def read_plan(run: RunFolder) -> dict[str, Any]:
    """Return the content of a run's ``plan.json``; raises ``RunNotFoundError`` if it is missing or damaged."""
    try:
        plan = json.loads(run.plan_file.read_bytes())
        plan["recipe"]["training"]["max_steps"]
        if uri := plan["recipe"].get("tracking", {}).get("uri"):
            plan["recipe"]["tracking"]["uri"] = mask(uri)  # plans of earlier versions may hold a password
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunNotFoundError(f"run {run.run_id}: {run.plan_file} is not a plan: {error}") from None
    return dict(plan)


def read_recipe(run: RunFolder) -> dict[str, Any]:
    """Return a run's resolved recipe."""
    return dict(read_plan(run)["recipe"])


def describe_policies(recipe: dict[str, Any]) -> str:
    """Return policies in one line, with the options that are not defaults: ``topk keep=0.1 along=columns``."""
    entries = []
    for entry in recipe["policy"]:
        usual = _find_defaults(entry["name"]) | {"name": entry["name"]}
        options = [f"{key}={value}" for key, value in entry.items() if key not in usual or value != usual[key]]
        entries.append(" ".join([entry["name"], *options]))
    return ", ".join(entries)


@cache
def _find_defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a policy's options as plan.json writes them; empty for a policy that is not installed."""
    try:
        policy_class = find_policy(name).policy_class
    except PolicyError:
        return {}
    assert policy_class is not None
    options = policy_class.model_json_schema().get("properties", {})
    return {key: option["default"] for key, option in options.items() if "default" in option}


def find_one(word: str) -> RunFolder:
    """Return the run that a word names; the newest, if a name has several."""
    return find_run(word)[-1]


def find_all(words: list[str]) -> list[RunFolder]:
    """Return every run that one of the words names, each once, in the order of the words."""
    return list({run.run_id: run for word in words for run in find_run(word)}.values())
