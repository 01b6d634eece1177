"""The policies' reference: options from their classes, claims from policies made with them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from generator.markdown import code, head, table, unwrap
from sparsebp_cli.backward.linear.function import kernel_share
from sparsebp_cli.cli.policies import describe_policy
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Budget, FoundPolicy, GradientSelector, InformedSelector, Policy, find_policies
from sparsebp_cli.policy.known_kind import find_kinds
from sparsebp_cli.policy.shelf import SHELF

TEXT = """This page lists every policy of SparseBP. Some come with the package `sparsebp-shelf`, which `make setup`
installs from a checkout: SHELVED.
`sparsebp policies` lists all installed policies, also of other plugins. To write one, see
[write a policy](../guide/policy.md).

Some policies have a table of claims: what the policy declares for each choice of its options. *Exact*: every gradient
equals the dense gradient. *Unbiased*: the mean of a selected gradient over random draws is the dense gradient.
*Budget*: fraction of the gradient's entries that the policy keeps. *Backward*: fraction of a linear layer's
multiplications that remain in the backward. The conformance suite compares each claim with executed steps."""

CARD_TEXT = """*Work* counts the multiplications of a step, forward and backward, in the linear layers where the policy
decides. If these differ by step or layer, it is their mean. Dense training is 1; options have their defaults. So a step
is at most 1 / work times as fast. N, D and O are the numbers of rows, inputs and outputs of a linear layer. `trained`
is the fraction of weights that are trained, `carried` the fraction of rows with a backward, `computed` the fraction of
rows that are computed. *Work* leaves out the rest of a step: attention, norms, head, optimizer and the choice itself.
*Exact* and *unbiased* hold for the default numbers; numbers without a default are 0.5. *varies*: the claim depends on
an option that is not a number.
"""

NUMBERS = (0.25, 0.5, 1.0)  # values of a share for which claims are shown

OURS = {"sparsebp": "sparsebp_cli", SHELF: "sparsebp_shelf"}  # distributions of this repository, and what they hold
KINDS = tuple(kind for kind in find_kinds().kinds if kind.policy.__module__.partition(".")[0] in OURS.values())
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}


def built_in() -> dict[str, FoundPolicy]:
    """Return the policies of this repository; other installed policies are on no page."""
    found = {name: policy for name, policy in find_policies().items() if policy.source.split()[0] in OURS}
    assert {policy.source.split()[0] for policy in found.values()} == set(OURS), "make setup installs the shelf"
    for name, policy in found.items():
        if policy.policy_class is None:
            raise UsageError(f"the policy {name!r} of {policy.source} is broken: {policy.problem}")
        if policy.policy_class.card is None:
            text = "this page shows the card of each policy: give its class card = MethodCard(use=...)"
            raise UsageError(f"the policy {name!r} of {policy.source} has no card; {text}")
    return found


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    shelved = ", ".join(code(name) for name, found in built_in().items() if found.source.split()[0] == SHELF)
    parts = [head("Policies", TEXT.replace("SHELVED", shelved)), _catalogue(), CARD_TEXT]
    for name, found in built_in().items():
        assert found.policy_class is not None, found.problem
        parts += _policy(name, found, found.policy_class)
    return "\n".join(parts).rstrip("\n") + "\n"


def _catalogue() -> str:
    """Return the table of all policies, a line each."""
    rows = []
    for name, found in built_in().items():
        line = describe_policy(found)
        claims = ["varies" if claim is None else "yes" if claim else "no" for claim in (line.exact, line.unbiased)]
        card = found.policy_class.card if found.policy_class else None
        assert card is not None
        work = code(card.work) if card.work else ""
        rows.append((f"[{name}](#{name})", found.kind, *claims, ", ".join(card.saves), work, str(card.year or "")))
    return table(("policy", "kind", "exact", "unbiased", "can save", "work", "year"), rows)


def _card(policy_class: type[Policy]) -> str:
    """Return the card as a list."""
    card = policy_class.card
    assert card is not None
    words = {"use": "When", "memory": "Kept for the backward", "claimed": "The publication claims"}
    words |= {"measured": "Measured here", "code": "Official code"}
    lines = [f"- *{word}*: {getattr(card, key)}" for key, word in words.items() if getattr(card, key)]
    if card.work:
        lines.insert(1, f"- *Work*: {code(card.work)} of dense{_ceiling(policy_class, card.work)}")
    return "\n".join(lines) + "\n"


def _ceiling(policy_class: type[Policy], work: str) -> str:
    """Return how many times as fast its linears can be, for a quarter where a share is kept."""
    if "keep" not in work or any(letter in work for letter in "NDO"):
        return ""
    options = {name: field.default for name, field in policy_class.model_fields.items()} | {"keep": 0.25}
    return f"; at keep 0.25 at most {1 / eval(work, {'__builtins__': {}}, options):.2f} times as fast"


def _policy(name: str, found: FoundPolicy, policy_class: type[Policy]) -> list[str]:
    from generator.recipe import describe_range, show_default

    schema = policy_class.model_json_schema()
    required = schema.get("required", ())
    rows = [
        (code(key), describe_range(option), show_default(option, required=key in required), option["description"])
        for key, option in schema.get("properties", {}).items()
    ]
    options = table(("option", "value", "default", "meaning"), rows) if rows else "No options.\n"
    return [
        f"## {name}\n",
        f"*{found.kind}.* {unwrap(policy_class.__doc__)}\n",
        unwrap(_module(policy_class).__doc__) + "\n",
        _card(policy_class),
        options,
        _claims(policy_class) if issubclass(policy_class, GradientSelector) else KINDS_BY_NAME[found.kind].asked,
    ]


def _module(policy_class: type[Policy]) -> ModuleType:
    from importlib import import_module

    return import_module(policy_class.__module__)


def _claims(policy_class: type[Policy]) -> str:
    """Describe the policy's claims for every valid value of its choices, without the options that all selectors
    have.
    """
    common = GradientSelector.model_fields
    options = {k: o for k, o in policy_class.model_json_schema().get("properties", {}).items() if k not in common}
    shown = [name for name, option in options.items() if len(_examples(option)) > 1]
    rows = []
    for values in product(*(_examples(options[name]) for name in shown)):
        chosen = dict(zip(shown, values, strict=True))
        try:
            policy = policy_class.model_validate_json(json.dumps(chosen))
        except ValidationError:
            continue  # this choice is not valid with the others
        assert isinstance(policy, GradientSelector)
        claims = ("yes" if claim else "no" for claim in (policy.exact, policy.unbiased))
        rows.append((*(str(value).lower() for value in values), *claims, *_shares(policy)))
    return table((*shown, "exact", "unbiased", "budget", "backward"), rows)


def _shares(policy: GradientSelector) -> tuple[str, str]:
    """Return the budget, and the share of a linear's multiplications that is left with it."""
    budget = Budget.of(policy.budget)
    split = policy.split if isinstance(policy, InformedSelector) else None
    kinds = (policy.selection, policy.selection) if split is None else split
    left = [kernel_share(kind, share) for kind, share in zip(kinds, (budget.dgrad, budget.wgrad), strict=True)]
    same = budget.dgrad == budget.wgrad
    shown = f"{budget.dgrad:g}" if same else f"{budget.dgrad:g} dgrad, {budget.wgrad:g} wgrad"
    return shown, f"{sum(left) / 2:g}"


def _examples(option: dict[str, Any]) -> tuple[Any, ...]:
    if "enum" in option:
        return tuple(option["enum"])
    return {"boolean": (False, True), "number": NUMBERS}.get(option.get("type", ""), (option.get("default"),))
