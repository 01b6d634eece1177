"""Describe the policies of a stored recipe in one line, for lists of runs, summaries and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.policy.known_kind import find_kinds
from sparsebp_cli.run.stored_recipe import SCHEDULE


def describe_policies(recipe: Mapping[str, Any]) -> str:
    """Return the policies in one line with their non-default options: ``topk keep=0.1 along=columns``."""
    return ", ".join(map(describe_policy, recipe["policy"])) or "dense"


def describe_policy(entry: Mapping[str, Any]) -> str:
    """Return a policy as a recipe writes it: its name and its non-default options."""
    if entry["name"] == SCHEDULE:
        return f"{SCHEDULE} of {', '.join(map(_describe_phase, entry['phases']))}"
    usual = _find_defaults(entry["name"]) | {"name": entry["name"]}
    options = [f"{key}={value}" for key, value in entry.items() if key not in usual or value != usual[key]]
    return " ".join([entry["name"], *options])


def _describe_phase(phase: Mapping[str, Any]) -> str:
    until = f" until {phase['until']}" if phase.get("until") is not None else ""
    return f"{describe_policies(phase)}{until}"


@cache
def _find_defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a policy's options as plan.json writes them. Of a policy that is not installed, only
    null options of a kind and options that are gone are known."""
    try:
        policy_class = find_policy(name).policy_class
    except PolicyError:
        kinds = [kind.policy for kind in find_kinds().kinds]
        null = {key: None for kind in kinds for key, field in kind.model_fields.items() if field.default is None}
        return null | {key: value for kind in kinds for key, value in getattr(kind, "former_options", ())}
    assert policy_class is not None
    options = policy_class.model_json_schema().get("properties", {})
    defaults = {key: option["default"] for key, option in options.items() if "default" in option}
    return defaults | dict(getattr(policy_class, "former_options", ()))  # recipes of older versions contain these
