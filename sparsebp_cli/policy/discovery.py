"""Policies are found by entry point, built-in ones like those of plugins. A broken plugin is shown, never dropped."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pydantic import ValidationError

from sparsebp_cli.errors import PolicyError, did_you_mean
from sparsebp_cli.policy.contract import Policy

GROUP = "sparsebp.policies"


@dataclass(frozen=True)
class FoundPolicy:
    """One installed policy.

    Args:
        name: The name that recipes use.
        source: The distribution it comes from, and its version.
        policy_class: The class; None when the plugin is broken.
        problem: Why it is broken, one line; empty when it works.
    """

    name: str
    source: str
    policy_class: type[Policy] | None
    problem: str = ""

    @property
    def kind(self) -> str:
        """The question that it answers: the name of the contract class it derives from."""
        if self.policy_class is None:
            return "broken"
        return next(c.__name__ for c in self.policy_class.__mro__[1:] if inspect.isabstract(c))


def find_policies() -> dict[str, FoundPolicy]:
    """Return every installed policy by name, sorted; broken ones carry their problem.

    Returns:
        Name to policy. Two distributions that offer the same name make that name broken, and both are named.
    """
    found: dict[str, FoundPolicy] = {}
    for entry in sorted(set(entry_points(group=GROUP)), key=lambda e: e.name):
        policy = _load(entry)
        if entry.name in found and found[entry.name].source != policy.source:
            both = f"{found[entry.name].source} and {policy.source}"
            policy = FoundPolicy(entry.name, both, None, f"two distributions offer this name: {both}")
        found[entry.name] = policy
    return found


def make_policy(name: str, **options: object) -> Policy:
    """Make a policy by name, with its options checked.

    Args:
        name: A name that ``sparsebp policies`` lists.
        **options: The policy's options.

    Returns:
        The policy, frozen.

    Raises:
        PolicyError: The name is unknown, the plugin broken, or an option wrong.
    """
    found = find_policies()
    if name not in found:
        raise PolicyError(f"unknown policy {name!r}; installed: {', '.join(found)}{did_you_mean(name, found)}")
    policy_class = found[name].policy_class
    if policy_class is None:
        raise PolicyError(f"policy {name!r} of {found[name].source} is broken: {found[name].problem}")
    try:
        return policy_class(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = did_you_mean(key, policy_class.model_fields) if first["type"] == "extra_forbidden" else ""
        raise PolicyError(f"policy {name!r}: {key}: {first['msg']}, got {first['input']!r}{known}") from None


def _load(entry: EntryPoint) -> FoundPolicy:
    source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
    try:
        policy_class = entry.load()
    except Exception as error:  # a plugin may fail in any way; its name and reason are shown
        return FoundPolicy(entry.name, source, None, f"{type(error).__name__}: {error}".splitlines()[0])
    if not (inspect.isclass(policy_class) and issubclass(policy_class, Policy)):
        return FoundPolicy(entry.name, source, None, f"{entry.value} is not a Policy class")
    if inspect.isabstract(policy_class):
        missing = ", ".join(sorted(policy_class.__abstractmethods__))
        return FoundPolicy(entry.name, source, None, f"{entry.value} leaves abstract: {missing}")
    return FoundPolicy(entry.name, source, policy_class)
