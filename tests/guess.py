"""Options of policies that a list does not name: tests of every policy try a new one without a line of theirs.

A list of such a test names the options that are worth trying beyond these, each for a policy that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsebp_cli.policy import FoundPolicy, Policy
from tests.plugin import find_ours

_BY_ENGINE: dict[str, list[Any]] = {
    "layers": [[0], [-1]],
    "where": [["layers.0", "layers.2"]],
}  # every selector has them

# Patterns that fit the decoder of the conformance suite, and options whose schema says too little.
_FITTING: dict[str, list[Any]] = {
    "train": [["lm_head", "layers.3"]],
    "freeze": [["*norm*"], ["/layers\\.[01]\\./"]],
    "turn": ["layers"],
    "reference": ["austen-llama"],
    "mask_column": ["loss_mask"],
    "rows": [["layers.0.up_proj", "layers.0.gate_proj"]],
    "columns": [["layers.0.down_proj"]],
    "blocks": [["layers.1.up_proj"]],
    "elements": [["layers.1.down_proj"]],
    "block_size": [32, 256],
}

_Case = TypeVar("_Case")


def guess_values(option: str, schema: dict[str, Any]) -> list[Any]:
    """Return values of an option that are worth trying, by its JSON schema."""
    if option in _BY_ENGINE | _FITTING:
        return (_BY_ENGINE | _FITTING)[option]
    schema = schema.get("anyOf", [schema])[0]  # an option that may be null, which is its default
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [False, True]
    if schema.get("type") == "number":
        return [0.5, 0.1, 1.0]
    if schema.get("type") == "integer":
        low = schema.get("minimum", 1)
        return [low, low + 2]
    if schema.get("type") == "array":
        return [schema["default"], [2, 3]]
    raise AssertionError(f"teach tests/guess.py values for {option}: {schema}")


def guess_required(policy_class: type[Policy] | None) -> dict[str, Any]:
    """Return values of the options that a policy demands; the others keep their defaults."""
    assert policy_class is not None, "the policy is broken"
    schema = policy_class.model_json_schema()
    return {name: guess_values(name, schema["properties"][name])[0] for name in schema.get("required", [])}


def sites_of(found: FoundPolicy) -> str:
    """Return the ``sites`` at which a policy decides: a router's are the nodes of the graph."""
    return "nodes" if found.kind == "EdgeRouter" else "linears"


def of_every_policy(
    named: Mapping[str, _Case], guess: Callable[[str, dict[str, Any], FoundPolicy], _Case]
) -> dict[str, _Case]:
    """Return a case of each policy of this package: that which a list names, or one with guessed options.

    Args:
        named: The list, by name of the policy.
        guess: Makes the case of a policy that the list does not name: from its name, its options and what was found.

    Returns:
        The cases by name, sorted.
    """
    own = find_ours()
    assert not named.keys() - own.keys(), "a list names a policy that is gone"
    return {
        name: named[name] if name in named else guess(name, guess_required(found.policy_class), found)
        for name, found in own.items()
    }
