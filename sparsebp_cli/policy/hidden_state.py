"""What a policy could keep from one decision to the next without the engine's knowledge.

It would be lost at a resume, and the resumed run would train another model. Such policies are refused.
"""

from __future__ import annotations

from functools import cached_property

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy.contract import Policy

_WHY = "which no checkpoint holds: a policy is frozen options and a decision, and declares its state by Stateful"


def find_hidden_state(policy_class: type[Policy]) -> str:
    """Return what is wrong with a class that could remember something by itself; empty if it could not."""
    for name in policy_class.__private_attributes__.keys() - Policy.__private_attributes__.keys():
        return f"keeps state in its private attribute {name!r}, {_WHY}"
    if not policy_class.model_config.get("frozen"):
        return "has options that can be changed: keep frozen=True"
    if policy_class.model_config.get("extra") == "allow":
        return "takes unknown options: keep extra='forbid'"
    for above in policy_class.__mro__[: policy_class.__mro__.index(Policy)]:
        for name, value in vars(above).items():
            if not name.startswith(("__", "_abc_", "model_")) and _can_change(value):
                kind = type(value).__name__
                return f"has a class attribute {name!r} that can change ({kind}), {_WHY}; a constant is a tuple"
    return ""


def refuse_hidden_state(policy: Policy) -> None:
    """Raise PolicyError for a policy that remembers, or could remember, something by itself."""
    problem = find_hidden_state(type(policy))
    unknown = [name for name in vars(policy) if name not in type(policy).model_fields]
    if not problem and unknown:
        problem = f"keeps state in its attribute {unknown[0]!r}, {_WHY}"
    if problem:
        raise PolicyError(f"{type(policy).__name__} {problem}")


def _can_change(value: object) -> bool:
    """Return whether a value of a class could be changed in place: a list, a dict, a set, an array, an iterator."""
    kind = type(value)
    if isinstance(value, type):
        return False
    changes = any(hasattr(kind, name) for name in ("__setitem__", "__next__", "discard"))
    return changes or isinstance(value, cached_property)
