"""The policies that are measured, and their measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.policy import Policy, TokenSelector, find_policies, make_policy
from sparsebp_cli.policy.discovery import FoundPolicy
from sparsebp_cli.policy.known_kind import find_facts
from sparsebp_cli.recipe.composition import refuse_unsupported
from sparsebp_cli.recipe.description import describe_policies, describe_policy
from sparsebp_cli.recipe.schema import PolicyEntry, Recipe
from sparsebp_cli.worker.policy import compares, make_policies
from sparsebp_lab.exchange import BatchPair
from sparsebp_lab.worth.step_length import StepShare

SHARE = 0.5  # fraction to keep, for policies that require one, if all are measured


@dataclass
class Candidate:
    """A policy that is measured, and what was found so far."""

    name: str  # name and options, as in a recipe
    policies: Sequence[Policy]
    pairs: dict[str, list[list[BatchPair]]] = field(default_factory=lambda: {"plain": [], "adam": [], "curved": []})
    by_part: dict[str, list[float]] = field(default_factory=dict)  # squares of noise, of bias, and between batches
    # FLOPs of the policy and of dense at the measured points
    passes: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # the same for steps over the whole training
    trials: list[float] = field(default_factory=list)  # FLOPs of trial passes, mean over steps, one value a point
    # At each point, the remaining step length of the policy and of dense batches: see step_length.
    lengths: list[tuple[StepShare, list[StepShare]]] = field(default_factory=list)
    fixed: list[float] = field(default_factory=list)  # FLOPs of update and trial passes, one value a point
    step: int | None = None  # step that was measured instead, because it leaves nothing out at the points
    failure: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether all of its policies declare the dense gradient."""
        return all(policy.exact for policy in self.policies)


def find_candidates(recipe: Recipe, *, all_policies: bool) -> tuple[list[Candidate], list[dict[str, str]]]:
    """Return the policies to measure, the recipe's first, and the name and reason of each policy that is left out."""
    found, left_out = list[Candidate](), list[dict[str, str]]()
    name, policies = describe_policies(recipe.model_dump()), make_policies(recipe)
    if why := next(filter(None, (_find_reason(policy, recipe) for policy in policies)), ""):
        left_out.append({"name": name, "why": why})
    else:
        found.append(Candidate(name, policies))
    if all_policies:
        own = {candidate.name for candidate in found}
        for name, installed in find_policies().items():
            candidate = _try_candidate(recipe, name, installed)
            if isinstance(candidate, str):
                left_out.append({"name": name, "why": candidate})
            elif candidate.name not in own:
                found.append(candidate)
    return found, left_out


def _try_candidate(recipe: Recipe, name: str, installed: FoundPolicy) -> Candidate | str:
    """Return an installed policy with its defaults, and half of everything if it requires a fraction; or the reason why
    it is not measured."""
    if installed.policy_class is None:
        return f"broken: {installed.problem}"
    required = [key for key, option in installed.policy_class.model_fields.items() if option.is_required()]
    if set(required) - {"keep"}:
        return f"needs {', '.join(required)}: write this policy with its options into the recipe"
    options: dict[str, Any] = {"keep": SHARE} if required else {}
    changed = recipe.model_copy(update={"policy": [PolicyEntry(name=name, **options)]})
    try:
        refuse_unsupported(changed)
        policy = make_policy(name, **options)
    except SparseBPError as error:
        return str(error)
    return _find_reason(policy, recipe) or (
        "needs a reference model, which the recipe's own policies do not have"
        if compares(policy)
        else "reads columns of the data: write this policy into the recipe"
        if isinstance(policy, TokenSelector) and policy.reads
        else Candidate(describe_policy({"name": name} | options), [policy])
    )


def _find_reason(policy: Policy, recipe: Recipe) -> str:
    # It also sorts the examples of a step, so its batches would differ from dense's.
    if find_facts(policy).get("shares_updates") and recipe.training.gradient_accumulation_steps > 1:
        return "shares work between micro-batches, but this estimate measures each pass alone"
    return ""
