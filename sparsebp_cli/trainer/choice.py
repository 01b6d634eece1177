"""What the user chose: policies in the three ways of saying so, and the options of ``attach`` that go with them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebp_cli.backward import attach
from sparsebp_cli.composition import Setup, refuse
from sparsebp_cli.errors import PolicyError, UsageError, did_you_mean
from sparsebp_cli.policy import Policy, make_policy

Chosen = Policy | str | Mapping[str, Any]

_OURS = {
    "optimizer": "the trainer's own is used",
    "num_steps": "the trainer's max_steps is used",
}


@dataclass(frozen=True)
class Choice:
    """Everything that ``attach`` is called with, but the model and what only the trainer knows.

    Args:
        policies: Made.
        options: Of ``attach``, by name.
    """

    policies: tuple[Policy, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, policies: Sequence[Chosen], options: Mapping[str, Any], more: Mapping[str, Any]) -> Choice:
        """Make the policies and check the names of options.

        Args:
            policies: Each a policy, its name, or a mapping of ``name`` and options.
            options: Of ``attach``.
            more: The same, in the user's own words.

        Returns:
            The choice.

        Raises:
            UsageError: Something in it makes no sense.
            UnsupportedError: An option that a trainer cannot give.
        """
        if isinstance(policies, str | Mapping | Policy) or not isinstance(policies, Iterable):
            raise UsageError(f"policies must be a list, got {policies!r}")
        known = [name for name in inspect.signature(attach).parameters if name not in ("model", "policies", *_OURS)]
        for name in more:
            if name in _OURS:
                raise UsageError(f"attach_options: {name} cannot be given: {_OURS[name]}")
            if name not in known:
                raise UsageError(
                    f"attach_options: unknown option {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}"
                )
        refuse(Setup((), {"update": more.get("update", "deferred"), "loop": "trainer"}))
        chosen = {**options, **more}
        chosen["exclude"] = tuple(chosen["exclude"])
        return cls(tuple(_make(policy) for policy in policies), chosen)

    def describe(self) -> dict[str, Any]:
        """Return what a resumed training must have in common with the one before: plain values by dotted name."""
        found: dict[str, Any] = {}
        for number, policy in enumerate(self.policies):
            found[f"policies.{number}"] = f"{type(policy).__module__}:{type(policy).__qualname__}"
            dumped = policy.model_dump(mode="json")
            found |= {f"policies.{number}.{name}": value for name, value in dumped.items()}
        plain = {name: value for name, value in self.options.items() if isinstance(value, str | int | float | tuple)}
        return found | {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _make(policy: Chosen) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return make_policy(policy)
    if not isinstance(policy, Mapping):
        raise PolicyError(f"a policy must be a name, a mapping or a Policy, got {policy!r}")
    options = dict(policy)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise PolicyError(f"a policy's mapping needs its name, got {dict(policy)!r}")
    return make_policy(name, **options)
