"""Conformance suite for policies. Each broken promise is an ``AssertionError`` of one sentence.

Everything runs on the CPU with fixed seeds, in about a second.
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import GradientSelector, Policy, find_policies, make_policy
from sparsebp_cli.policy.hidden_state import find_hidden_state
from sparsebp_cli.policy.kind import load
from sparsebp_cli.policy.known_kind import find_kind
from sparsebp_cli.policy.option import validate_options
from sparsebp_cli.testing.promise import require, through_json
from sparsebp_cli.testing.selector import check_keep_all


def check_policy(policy: str | type[Policy] | Policy, **options: object) -> None:
    """Check a policy against every promise of the contract; a broken promise is an ``AssertionError``.

    Args:
        policy: The name of an installed policy, a class, or an instance, which already has its options.
        **options: Options for a name or a class, as in a recipe.

    Raises:
        UsageError: ``policy`` is none of these, or an instance with further options.
    """
    policy_class, options = _find_class(policy, options)
    options = {name: value for name, value in options.items() if name != "where"}  # the suite's sites have other names
    made = _check_options(policy_class, options)
    _check_control(made)
    kind = find_kind(made)
    if kind is None or not kind.suite:
        raise AssertionError(
            f"{policy_class.__name__} has no kind with a test suite: derive it from a kind, such as GradientSelector"
        )
    load(kind.suite)(made)
    if isinstance(made, GradientSelector) and "keep" in policy_class.model_fields:
        check_keep_all(validate_options(policy_class, options | {"keep": 1.0}))


def _find_class(policy: object, options: dict[str, object]) -> tuple[type[Policy], dict[str, object]]:
    if isinstance(policy, str):
        return _installed(policy), options
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy, options
    if not isinstance(policy, Policy):
        raise UsageError(f"check_policy takes the name, the class or an instance of a policy, got {policy!r}")
    if options:
        raise UsageError(f"check_policy: an instance has its options already: leave out {', '.join(options)}")
    _check_json(policy)
    return type(policy), policy.model_dump(mode="json")


def _installed(name: str) -> type[Policy]:
    found = find_policies()
    require(name in found, f"no policy {name!r} is installed; installed: {', '.join(found)}")
    policy_class = found[name].policy_class
    if policy_class is None:
        raise AssertionError(f"{name!r} of {found[name].source} is broken: {found[name].problem}")
    return policy_class


def _check_control(policy: Policy) -> None:
    name, entry = type(policy).__name__, policy.control
    if entry is None:
        return
    options = {key: value for key, value in entry.items() if key != "name"}
    try:
        control = make_policy(str(entry.get("name")), **options)
    except PolicyError as error:
        raise AssertionError(f"{name}: its control cannot be made: {error}") from None
    kind = find_kind(policy)
    same = type(policy) if kind is None else kind.policy
    require(isinstance(control, same), f"{name}: its control is of another kind: it must be a {same.__name__}")
    require(control.control is None, f"{name}: its control must have no control: name a policy that draws at random")
    budgets = (getattr(policy, "budget", None), getattr(control, "budget", None))
    require(budgets[0] == budgets[1], f"{name}: its budget is {budgets[0]}, but its control has {budgets[1]}")


def _check_options(policy_class: type[Policy], options: dict[str, object]) -> Policy:
    name = policy_class.__name__
    policy = validate_options(policy_class, options)
    problem = find_hidden_state(policy_class)
    require(not problem, f"{name} {problem}")
    try:
        validate_options(policy_class, options | {"an_option_that_nobody_has": 1})
    except ValidationError:
        pass
    else:
        raise AssertionError(f"{name}: accepts unknown options: set extra='forbid'")
    for option, field in policy_class.model_fields.items():
        require(bool(field.description), f"{name}: option {option!r} has no description")
    json.dumps(policy_class.model_json_schema())
    _check_json(policy)
    return policy


def _check_json(policy: Policy) -> None:
    name, again = type(policy).__name__, through_json(policy)
    require(again == policy, f"{name}: options differ after conversion to JSON and back: {policy!r}, then {again!r}")
