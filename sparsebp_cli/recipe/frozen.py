"""What frozen parameters and linears in float8 need of a recipe's other sections."""

from __future__ import annotations

from sparsebp_cli.policy import ParameterSelector, make_policy
from sparsebp_cli.policy.finding import Finding
from sparsebp_cli.recipe.schema import Recipe


def find_frozen(recipe: Recipe) -> list[Finding]:
    """Return what is wrong.

    Args:
        recipe: Each section of which is right by itself, the policies' options too.

    Returns:
        The findings; none for a recipe that can be carried out.
    """
    findings = []
    if recipe.model.float8 is not None and recipe.backward.sites == "branches":
        text = f"{recipe.model.float8}: linears in float8 are not built at backward.sites: branches; use linears"
        findings.append(Finding(("model", "float8"), text))
    processes = recipe.target.options.get("processes", 1)
    for index, entry in enumerate(recipe.policy):
        policy = make_policy(entry.name, **entry.options)
        if isinstance(policy, ParameterSelector) and policy.changes and processes != 1:
            text = f"{entry.name!r} with another set of parameters each step works in one process"
            findings.append(Finding(("policy", index, "name"), f"{text}, got target.processes: {processes}"))
    return findings
