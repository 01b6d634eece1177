"""Check that a channel selector keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_cli.testing import check_draws, check_repeatable, name_of, require
from sparsebp_shelf.channel.kind import ChannelGroup, ChannelSelector, Estimate, Part

NUM_STEPS, NUM_LAYERS = 40, 2
_STEPS = (0, 1, 13, NUM_STEPS - 1)


def check_channel_selector(policy: ChannelSelector) -> None:
    """Check a channel selector against every promise of the contract, with the groups of a model of two layers."""
    for check in _CHECKS:
        check(policy)


def _cases(policy: ChannelSelector) -> Iterator[tuple[Tensor | None, ChannelGroup, Step]]:
    for layer in range(NUM_LAYERS):
        for part, number in zip(get_args(Part), (48, 16, 16), strict=True):
            group = ChannelGroup(f"layers.{layer}.{part}", layer, NUM_LAYERS, part, number)
            generator = torch.Generator().manual_seed(layer)
            score_C = torch.rand(number, generator=generator).mul(8).round()  # rounding makes some scores equal
            for index in _STEPS:
                step = Step(index, seed=1, num_steps=NUM_STEPS)
                yield None if policy.estimate == "none" else score_C, group, step


def _choose(policy: ChannelSelector, score_C: Tensor | None, group: ChannelGroup, step: Step) -> Tensor | None:
    at = policy.at(step)
    return None if at.count(group, step) == group.num_channels else at.choose(score_C, group, step)


def _check_choice(policy: ChannelSelector) -> None:
    name = name_of(policy)
    require(policy.estimate in get_args(Estimate), f"{name}: estimate must be one of {', '.join(get_args(Estimate))}")
    require(type(policy.num_singular) is int and policy.num_singular >= 1, f"{name}: num_singular must be at least 1")
    for score_C, group, step in _cases(policy):
        kept = policy.at(step).count(group, step)
        text = f"{name}: count must be a whole number from 1 to {group.num_channels}, got {kept!r}"
        require(type(kept) is int and 1 <= kept <= group.num_channels, text)
        index_K = _choose(policy, score_C, group, step)
        if index_K is None:
            continue
        good = index_K.dtype == torch.int64 and index_K.shape == (kept,)
        require(good, f"{name}: choose must return int64 of shape ({kept},), as count says")
        good = bool((index_K[1:] > index_K[:-1]).all()) and int(index_K[0]) >= 0
        good = good and int(index_K[-1]) < group.num_channels
        require(good, f"{name}: channels must ascend and be below {group.num_channels}, got {index_K.tolist()}")


def _check_repeatable(policy: ChannelSelector) -> None:
    for score_C, group, step in _cases(policy):
        check_repeatable(policy, _choose, score_C, group, step)


def _check_draws(policy: ChannelSelector) -> None:
    asked = [(partial(_choose, policy, score_C, group), step) for score_C, group, step in _cases(policy)]
    check_draws(policy, asked, ("index", "micro_batch", "seed"))


def _check_exact(policy: ChannelSelector) -> None:
    leaves = any(_choose(policy, *case) is not None for case in _cases(policy))
    require(policy.exact != leaves, f"{name_of(policy)}: says it is {'' if policy.exact else 'not '}exact")


_CHECKS: tuple[Callable[[ChannelSelector], None], ...] = (_check_choice, _check_repeatable, _check_draws, _check_exact)
