"""What does not go with choosing tokens or examples, as far as the recipe tells."""

from __future__ import annotations

from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.policy.finding import Finding
from sparsebp_cli.recipe.schema import Recipe

CHOOSERS = ("TokenSelector", "ExampleSelector")


def find_chosen(recipe: Recipe) -> list[Finding]:
    """Say what is wrong with the policies that choose before the forward.

    Args:
        recipe: Its policies are installed; their options need not be good.

    Returns:
        What is wrong, at the policy's name.
    """
    findings = []
    for index, entry in enumerate(recipe.policy):
        kind = find_policy(entry.name).kind
        if kind not in CHOOSERS:
            continue
        text = ""
        if recipe.target.options.get("sharding", "none") != "none":
            text = f"{entry.name!r} needs target.sharding: none; weights that are cut into parts are not built for it"
        elif kind == "TokenSelector" and recipe.dataset.format == "classification":
            text = f"{entry.name!r} chooses tokens of a language model: dataset.format must be text or completion"
        elif kind == "TokenSelector" and recipe.backward.sites != "linears":
            text = f"{entry.name!r} needs backward.sites: linears, got {recipe.backward.sites}"
        if text:
            findings.append(Finding(("policy", index, "name"), text))
    return findings
