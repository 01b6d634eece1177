"""What every kind of policy promises, said once: the same decision at the same place and step, whoever asks; other
draws for other steps. A kind's own suite says how its policies are asked, and what only they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from itertools import count, islice
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from sparsebp_cli.policy import Policy, Step
from sparsebp_cli.testing.promise import Kind, enough, name_of, random_states, require, through_json, vary

_FEW, _MOST = 16, 4096  # draws after which one that was always alike is not random, and at most
# Unlike draws that are waited for, and how many times fewer there may truly be. That 8 come in an eighth of the draws
# which they take on average has a chance of 1e-5, and even then 999 of 1,000 policies are not refused.
_SEEN, _FEWER = 8, 4
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

    def differing(part: str, numbers: Iterable[int]) -> Iterator[bool]:
        for number in numbers:
            for ask, step in asked:
                (other,) = vary(step, part, [getattr(step, part) + number])
                yield not same(ask(step), ask(other))

    share = find_share(differing("draw", count(1)))
    if share is None:
        return False
    for part in parts:
        numbers = range(1, 2 + enough(share) // len(asked))
        text = f"{name_of(policy)}: is random but draws the same for every {part} of the step"
        require(any(differing(part, numbers)), text)
    return True


def find_share(differing: Iterable[bool]) -> float | None:
    """Return the share of draws that surely are unlike the first one; None: hardly any is.

    Args:
        differing: For one draw after another, whether it is unlike the first one.

    Returns:
        A fraction of the share that was seen; the suites wait for that many draws (:func:`enough`) before they refuse.
    """
    seen = 0
    for number, is_other in enumerate(islice(differing, _MOST), 1):
        seen += is_other
        if seen == _SEEN:
            return _SEEN / number / _FEWER
        if number == _FEW and not seen:
            return None
    return None


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
