"""Checks of the promises that all kinds of policies share: repeatable decisions, and independent draws for other steps.
The suite of each kind passes the function that calls its policies, and checks its further promises."""

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

# A policy is not random if its first _FEW draws are equal. No check needs more than _MOST draws.
_FEW, _MOST = 16, 4096
# find_share waits for _SEEN differing draws, and divides their share by _FEWER for safety. The probability that 8 come
# in an eighth of the expected number of draws is 1e-5. Even then the suite accepts 999 of 1,000 policies.
_SEEN, _FEWER = 8, 4
Place = ParamSpec("Place")


def check_repeatable(
    policy: Kind, ask: Callable[Concatenate[Kind, Place], object], *place: Place.args, **more: Place.kwargs
) -> None:
    """Check that a policy repeats its decision, that its copy in a resumed run decides the same, that it uses only the
    step's random generator, and that it does not change its arguments.

    Args:
        policy: A policy with its options.
        ask: Returns the decision of a policy at a place.
        *place: Positional arguments of ``ask`` after the policy.
        **more: Keyword arguments of ``ask``.
    """
    name, before, states = name_of(policy), deepcopy((place, more)), random_states()
    first = ask(policy, *place, **more)
    require(states == random_states(), f"{name}: uses a global random generator: use step.generator")
    require(same(before, (place, more)), f"{name}: changes what it receives")
    text = f"{name}: decides differently when called again at the same step"
    require(same(first, ask(policy, *place, **more)), text)
    text = f"{name}: decides differently in a resumed run: it keeps hidden state"
    require(same(first, ask(through_json(policy), *place, **more)), text)


def check_draws(policy: Policy, asked: Sequence[tuple[Callable[[Step], object], Step]], parts: Sequence[str]) -> bool:
    """Check that a random policy draws anew when seed, step, site or micro-batch changes.

    Args:
        policy: A policy with its options.
        asked: For each place, a function that returns the decision at a step, and the first step.
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
        text = f"{name_of(policy)}: depends on the step's seed, but draws the same for every draw: use step.generator"
        require(find_share(differing("seed", count(1))) is None, text)
        return False
    for part in parts:
        numbers = range(1, 2 + enough(share) // len(asked))
        text = f"{name_of(policy)}: is random, but draws the same for every {part} of the step"
        require(any(differing(part, numbers)), text)
    return True


def find_share(differing: Iterable[bool]) -> float | None:
    """Return a safe lower estimate of the fraction of draws that differ from the first; None: hardly any differs.

    Args:
        differing: Whether each further draw differs from the first.

    Returns:
        A quarter of the observed fraction. Suites pass it to :func:`enough` to get the number of draws before they
        refuse a policy.
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
    """Return whether two decisions, tensors or collections are equal: of one type, bit-identical, NaN equal to NaN."""
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
