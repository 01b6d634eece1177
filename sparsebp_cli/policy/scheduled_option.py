"""Separation of a policy's options into plain values and schedules, with errors for options that cannot follow one."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.schedule import Schedule

if TYPE_CHECKING:
    from sparsebp_cli.policy.contract import Policy

_ENDS = frozenset({"from", "to"})
_SCALARS = frozenset({int, float, bool, str})
_UNIONS = (Union, UnionType)


def is_schedulable(policy_class: type[Policy], option: str) -> bool:
    """Return whether an option may follow a schedule: a real number that the policy's ``constants`` do not name."""
    field = policy_class.model_fields.get(option)
    if field is None or not policy_class.takes_schedules or option in policy_class.constants:
        return False
    # Counts are excluded: a changed period would shift all later turns. See decision 103.
    return float in _kinds(field.annotation)


def split_schedules(
    policy_class: type[Policy], options: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, Schedule]]:
    """Return the options that are plain values, and the schedules of the others.

    Raises ValidationError for a wrong schedule, or for an option that cannot follow one.
    """
    plain, schedules = dict(options), dict[str, Schedule]()
    for name, value in options.items():
        if not isinstance(value, Mapping) or name not in policy_class.model_fields:
            continue
        if is_schedulable(policy_class, name):
            schedules[name] = _read(policy_class, name, value)
            del plain[name]
        elif value.keys() >= _ENDS and _is_scalar(policy_class, name):
            raise _refusal(policy_class, name, value, _why(policy_class, name))
    return plain, schedules


def needs_length(policy: Policy, num_steps: int | None) -> None:
    """Raise UsageError if a policy has schedules and ``num_steps`` is None."""
    if policy.schedules and num_steps is None:
        name = next(iter(policy.schedules))
        raise UsageError(
            f"{type(policy).__name__}: {name} follows a schedule: pass the number of steps to attach(num_steps=...)"
        )


def _kinds(annotation: object) -> set[object]:
    """Return the types that an option's annotation allows, without their constraints."""
    if get_origin(annotation) is Literal:
        return set()
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in _UNIONS:
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation}


def _is_scalar(policy_class: type[Policy], name: str) -> bool:
    annotation = policy_class.model_fields[name].annotation
    return get_origin(annotation) is Literal or bool(_kinds(annotation) & _SCALARS)


def _why(policy_class: type[Policy], name: str) -> str:
    if not policy_class.takes_schedules:
        return "cannot follow a schedule: this kind of policy decides the same at every step; give one value"
    if name in policy_class.constants:
        return "cannot follow a schedule: this option sets when something happens; give one value"
    return "cannot follow a schedule: only real numbers can, not whole numbers or words; give one value"


def _read(policy_class: type[Policy], name: str, value: Mapping[str, object]) -> Schedule:
    try:
        return Schedule.model_validate(dict(value))
    except ValidationError as error:
        lines = [
            InitErrorDetails(
                type=details["type"], loc=(name, *details["loc"]), input=details["input"], ctx=details.get("ctx", {})
            )
            for details in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(policy_class.__name__, lines) from None


def _refusal(policy_class: type[Policy], name: str, value: object, why: str) -> ValidationError:
    line = InitErrorDetails(type="value_error", loc=(name,), input=value, ctx={"error": ValueError(why)})
    return ValidationError.from_exception_data(policy_class.__name__, [line])
