"""The user's policies, given as objects, names or mappings, and the options of ``attach`` that go with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebp_cli.composition import BackwardChoices, BackwardOptions, Setup, refuse
from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Policy, make_policy

PolicyLike = Policy | str | Mapping[str, Any]


@dataclass(frozen=True)
class AttachOptions:
    """Arguments of ``attach`` that the user gives; the trainer adds the model, its optimizer and the number of
    steps."""

    policies: tuple[Policy, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        policies: Sequence[PolicyLike],
        backward: BackwardOptions | BackwardChoices | None,
        seed: int | None,
        reference: object,
    ) -> AttachOptions:
        """Make the policies, and refuse options that no trainer supports."""
        if isinstance(policies, str | Mapping | Policy) or not isinstance(policies, Iterable):
            raise UsageError(f"policies must be a list, got {policies!r}")
        backward = BackwardOptions.of(backward)
        refuse(Setup((), {"update": backward.update, "checkpointing": backward.checkpointing, "loop": "trainer"}))
        options: dict[str, Any] = dict(backward.choices())
        options |= {} if seed is None else {"seed": seed}
        options |= {} if reference is None else {"reference": reference}
        return cls(tuple(_make(policy) for policy in policies), options)

    def describe(self) -> dict[str, Any]:
        """Return what a resumed training must have in common with the earlier one: plain values by dotted name."""
        found: dict[str, Any] = {}
        for number, policy in enumerate(self.policies):
            found[f"policies.{number}"] = f"{type(policy).__module__}:{type(policy).__qualname__}"
            dumped = policy.model_dump(mode="json")
            found |= {f"policies.{number}.{name}": value for name, value in dumped.items()}
        return found | {
            name: value for name, value in self.options.items() if isinstance(value, str | int | float | list)
        }


def _make(policy: PolicyLike) -> Policy:
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
