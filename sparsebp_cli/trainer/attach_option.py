"""A trainer's arguments for ``attach``, and the values that a resumed training must share with the earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from torch import nn

from sparsebp_cli.backward import Phase
from sparsebp_cli.backward.phase import Schedule, make_schedule
from sparsebp_cli.composition import BackwardChoices, BackwardOptions, Setup, refuse
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, PolicyLike, make_policies


class AttachArguments(TypedDict, total=False):
    """Arguments of ``attach`` for which the trainer has defaults."""

    seed: int
    reference: nn.Module | Literal["batch"]


@dataclass(frozen=True)
class AttachOptions:
    """The user's arguments of ``attach``. The trainer adds the model, its optimizer and the number of steps."""

    policies: tuple[Policy, ...]
    schedule: Schedule | None
    choices: BackwardChoices
    given: AttachArguments

    @classmethod
    def of(
        cls,
        policies: PolicyLike | Sequence[PolicyLike],
        backward: BackwardOptions | BackwardChoices | None,
        seed: int | None,
        reference: nn.Module | Literal["batch"] | None,
        schedule: Sequence[Phase] | None,
    ) -> AttachOptions:
        """Make the policies, and refuse options that no trainer supports."""
        made = make_policies(policies)
        if schedule is not None and made:
            raise UsageError("give only one of policies and schedule, got both")
        backward = BackwardOptions.of(backward)
        names = ("update", "checkpointing")
        refuse(Setup((), {name: getattr(backward, name) for name in names} | {"loop": "trainer"}))
        given = AttachArguments()
        if seed is not None:
            given["seed"] = seed
        if reference is not None:
            given["reference"] = reference
        return cls(made, None if schedule is None else make_schedule(schedule), backward.choices(), given)

    @property
    def phases(self) -> Schedule:
        """The end and the policies of each phase. Without a schedule there is one phase."""
        return [(None, self.policies)] if self.schedule is None else self.schedule

    def describe(self) -> dict[str, object]:
        """Return the values that a resumed training must share with the earlier one: plain values by dotted name."""
        found: dict[str, object] = {}
        for place, (until, policies) in enumerate(self.phases):
            start = "" if self.schedule is None else f"schedule.{place}."
            found |= {} if until is None else {f"{start}until": until}
            for number, policy in enumerate(policies):
                key = f"{start}policies.{number}"
                found[key] = f"{type(policy).__module__}:{type(policy).__qualname__}"
                found |= {f"{key}.{name}": value for name, value in policy.model_dump(mode="json").items()}
        options = {**self.choices, **self.given}
        return found | {name: value for name, value in options.items() if isinstance(value, str | int | float | list)}
