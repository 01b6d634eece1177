"""Checks that refuse policies with hidden state: values that change between decisions and that no checkpoint contains.

Hidden state would be lost at a resume, and the resumed run would train another model.
"""

from __future__ import annotations

from functools import cached_property

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy.contract import Policy

_WHY = "which no checkpoint saves: make options immutable, and derive from Stateful to keep state"


def find_hidden_state(policy_class: type[Policy]) -> str:
    """Return why a class could keep hidden state; empty if it could not."""
    for name in policy_class.__private_attributes__.keys() - Policy.__private_attributes__.keys():
        return f"keeps state in its private attribute {name!r}, {_WHY}"
    if not policy_class.model_config.get("frozen"):
        return "allows changes of its options: set frozen=True"
    if policy_class.model_config.get("extra") == "allow":
        return "accepts unknown options: set extra='forbid'"
    for above in policy_class.__mro__[: policy_class.__mro__.index(Policy)]:
        for name, value in vars(above).items():
            if not name.startswith(("__", "_abc_", "model_")) and _can_change(value):
                kind = type(value).__name__
                return f"has a class attribute {name!r} that can change ({kind}), {_WHY}; use a tuple for a constant"
    return ""


def refuse_hidden_state(policy: Policy) -> None:
    """Raise PolicyError for a policy that keeps, or could keep, hidden state."""
    problem = find_hidden_state(type(policy))
    unknown = [name for name in vars(policy) if name not in type(policy).model_fields]
    if not problem and unknown:
        problem = f"keeps state in its attribute {unknown[0]!r}, {_WHY}"
    if problem:
        raise PolicyError(f"{type(policy).__name__} {problem}")


def _can_change(value: object) -> bool:
    """Return whether a class attribute could be changed in place, such as a list, dict, set, array or iterator."""
    kind = type(value)
    if isinstance(value, type):
        return False
    changes = any(hasattr(kind, name) for name in ("__setitem__", "__next__", "discard"))
    return changes or isinstance(value, cached_property)
