"""A trainer's arguments for ``attach``, and the values that a resumed training must share with the earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from torch import nn

from sparsebp_cli.policy import Policy, PolicyLike, make_policies
from sparsebp_cli.policy.composition import BackwardChoices, BackwardOptions, Setup, refuse


class AttachArguments(TypedDict, total=False):
    """Arguments of ``attach`` for which the trainer has defaults."""

    seed: int
    reference: nn.Module | Literal["batch"]


@dataclass(frozen=True)
class AttachOptions:
    """The user's arguments of ``attach``. The trainer adds the model, its optimizer and the number of steps."""

    policies: tuple[Policy, ...]
    choices: BackwardChoices
    given: AttachArguments

    @classmethod
    def of(
        cls,
        policies: PolicyLike | Sequence[PolicyLike],
        backward: BackwardOptions | BackwardChoices | None,
        seed: int | None,
        reference: nn.Module | Literal["batch"] | None,
    ) -> AttachOptions:
        """Make the policies, and refuse options that no trainer supports."""
        made = make_policies(policies)
        backward = BackwardOptions.of(backward)
        names = ("update", "checkpointing")
        refuse(Setup((), {name: getattr(backward, name) for name in names} | {"loop": "trainer"}))
        given = AttachArguments()
        if seed is not None:
            given["seed"] = seed
        if reference is not None:
            given["reference"] = reference
        return cls(made, backward.choices(), given)

    def describe(self) -> dict[str, object]:
        """Return the values that a resumed training must share with the earlier one: plain values by dotted name."""
        found: dict[str, object] = {}
        for number, policy in enumerate(self.policies):
            key = f"policies.{number}"
            found[key] = f"{type(policy).__module__}:{type(policy).__qualname__}"
            found |= {f"{key}.{name}": value for name, value in policy.model_dump(mode="json").items()}
        options = {**self.choices, **self.given}
        return found | {name: value for name, value in options.items() if isinstance(value, str | int | float | list)}
