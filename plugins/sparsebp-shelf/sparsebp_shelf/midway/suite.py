"""Check that a midway selector keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from sparsebp_cli.policy import Observed, State, Stateful, Step
from sparsebp_cli.testing import check_draws, check_repeatable, check_state, name_of, require
from sparsebp_shelf.midway.kind import Features, FeatureWidth, MidwaySelector, ReadFeatures

NUM_STEPS, WIDTH = 24, 5
_PLACES = (FeatureWidth(WIDTH),)


def check_midway_selector(policy: MidwaySelector) -> None:
    """Check a midway selector against every promise of the contract, with batches of one to sixteen examples."""
    check_state(policy, _PLACES, _show)
    for check in _CHECKS:
        check(policy)


def _draw(number: int, seed: int) -> Tensor:
    # rounding makes some equal
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed)).mul(2).round()


def _show(seed: int) -> list[Observed]:
    return [ReadFeatures("features", _draw(6, seed))]


def _states(policy: MidwaySelector) -> list[State]:
    """Return the state before the first step, and the state after one step."""
    if not isinstance(policy, Stateful):
        return [{}]
    first = policy.init(_PLACES)
    return [first, policy.observe(first, policy.look(_show(0), Step(0, num_steps=NUM_STEPS)), Step(0))]


def _cases(policy: MidwaySelector) -> Iterator[tuple[Features, Step]]:
    for state in _states(policy):
        for index in range(1, NUM_STEPS, 5):
            for number in (1, 2, 7, 16):
                features = Features(number, _draw(number, index) if policy.reads_features else None)
                yield features, Step(index, seed=1, num_steps=NUM_STEPS, state=state)


def _choose(policy: MidwaySelector, features: Features, step: Step) -> Tensor | None:
    at = policy.at(step)
    return None if at.count(features.number, step) == features.number else at.choose(features, step)


def _check_choice(policy: MidwaySelector) -> None:
    name = name_of(policy)
    require(type(policy.num_first) is int and policy.num_first >= 1, f"{name}: num_first must be a number from 1")
    for features, step in _cases(policy):
        kept = policy.at(step).count(features.number, step)
        text = f"{name}: count must be a whole number from 1 to {features.number}, got {kept!r}"
        require(type(kept) is int and 1 <= kept <= features.number, text)
        index_K = _choose(policy, features, step)
        if index_K is None:
            continue
        good = index_K.dtype == torch.int64 and index_K.shape == (kept,)
        require(good, f"{name}: choose must return int64 of shape ({kept},), as count says")
        good = bool((index_K[1:] > index_K[:-1]).all()) and int(index_K[0]) >= 0 and int(index_K[-1]) < features.number
        require(good, f"{name}: examples must ascend and be below {features.number}, got {index_K.tolist()}")


def _check_repeatable(policy: MidwaySelector) -> None:
    for features, step in _cases(policy):
        check_repeatable(policy, _choose, features, step)


def _check_draws(policy: MidwaySelector) -> None:
    asked = [(partial(_choose, policy, features), step) for features, step in _cases(policy)]
    check_draws(policy, asked, ("index", "micro_batch", "seed", "rank"))


def _check_exact(policy: MidwaySelector) -> None:
    stops = any(_choose(policy, features, step) is not None for features, step in _cases(policy))
    require(policy.exact != stops, f"{name_of(policy)}: says it is {'' if policy.exact else 'not '}exact")


_CHECKS: tuple[Callable[[MidwaySelector], None], ...] = (_check_choice, _check_repeatable, _check_draws, _check_exact)
