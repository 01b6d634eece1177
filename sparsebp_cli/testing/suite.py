"""What every kind of policy promises, said once: the same decision at the same place and step, whoever asks; other
draws for other steps. A kind's own suite says how its policies are asked, and what only they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from sparsebp_cli.policy import Policy, Step
from sparsebp_cli.testing.promise import Kind, name_of, random_states, require, through_json, vary

_NUMBERS = range(1, 9)  # a policy that reads a part of the step draws alike at all of them hardly ever
Place = ParamSpec("Place")


def check_repeatable(
    policy: Kind, ask: Callable[Concatenate[Kind, Place], object], *place: Place.args, **more: Place.kwargs
) -> None:
    """Check that a policy decides alike when it is asked again, and when a resumed run asks its copy, with no generator
    but the step's, and that it leaves alone what it is shown.

    Args:
        policy: A policy with its options.
        ask: Returns the decision of a policy at a place.
        *place: Arguments with which ``ask`` shows the policy the place.
        **more: The same, by name.
    """
    name, before, states = name_of(policy), deepcopy((place, more)), random_states()
    first = ask(policy, *place, **more)
    require(states == random_states(), f"{name}: uses a global random generator: use step.generator")
    require(same(before, (place, more)), f"{name}: changes what it receives")
    text = f"{name}: decides differently when called again at the same step"
    require(same(first, ask(policy, *place, **more)), text)
    text = f"{name}: a resumed run decides differently: it keeps its own state"
    require(same(first, ask(through_json(policy), *place, **more)), text)


def check_draws(policy: Policy, asked: Sequence[tuple[Callable[[Step], object], Step]], parts: Sequence[str]) -> bool:
    """Check that a policy whose decision depends on the draw draws anew where another part of the step is another one.

    Args:
        policy: A policy with its options.
        asked: For each place a function that returns its decision at a step, and the first step.
        parts: Names of the fields of :class:`~sparsebp_cli.policy.Step` on which the draw must depend.

    Returns:
        Whether the policy is random.
    """

    def differs(part: str) -> bool:
        return any(
            not same(ask(step), ask(other))
            for ask, step in asked
            for other in vary(step, part, [getattr(step, part) + number for number in _NUMBERS])
        )

    is_random = differs("draw")
    for part in parts if is_random else ():
        require(differs(part), f"{name_of(policy)}: is random but draws the same for every {part} of the step")
    return is_random


def same(one: object, other: object) -> bool:
    """Return whether two decisions are equal, tensors to the last bit, NaN to NaN.

    Args:
        one: A tensor, a number, or a collection or frozen record of them.
        other: Another such object, of the same type if they are equal.

    Returns:
        Whether they are.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.isnan(), other.isnan())
            and (torch.equal(one.nan_to_num(), other.nan_to_num()))
        )
    if type(one) is not type(other):
        return False
    if is_dataclass(one) and not isinstance(one, type):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other
