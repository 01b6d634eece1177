"""Check that a token router keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_cli.testing import check_repeatable, name_of, require
from sparsebp_shelf.token_router.kind import RoutedLayer, TokenRouter

NUM_STEPS = 400
_STEPS = (0, 1, 57, 200, NUM_STEPS - 1)


def check_token_router(policy: TokenRouter) -> None:
    """Check a token router against every promise of the contract, with layers of a model of four, and batches of three
    examples of 12 and 300 positions."""
    for check in _CHECKS:
        check(policy)


def _cases() -> Iterator[tuple[RoutedLayer, Step]]:
    for number in range(4):
        for length in (12, 300):
            for index in _STEPS:
                yield RoutedLayer(number, 4, 3, length), Step(index, num_steps=NUM_STEPS)


def _check_route(policy: TokenRouter) -> None:
    for layer, step in _cases():
        at = policy.at(step)
        kept = at.count(layer, step)
        text = f"{name_of(policy)}: count must be a whole number from 1 to {layer.length}, got {kept!r}"
        require(type(kept) is int and 1 <= kept <= layer.length, text)
        if kept == layer.length:
            continue
        index_BK = at.route(layer, step)
        text = f"{name_of(policy)}: route must return int64 of shape {(3, kept)}, as count says"
        require(index_BK.dtype == torch.int64 and index_BK.shape == (3, kept), text)
        ascends = bool((index_BK[:, 1:] > index_BK[:, :-1]).all())
        inside = bool(((index_BK >= 0) & (index_BK < layer.length)).all())
        require(ascends and inside, f"{name_of(policy)}: positions must ascend and be below {layer.length}")


def _route(policy: TokenRouter, layer: RoutedLayer, step: Step) -> Tensor:
    return policy.at(step).route(layer, step)


def _check_repeatable(policy: TokenRouter) -> None:
    for layer, step in _cases():
        if policy.at(step).count(layer, step) == layer.length:
            continue
        check_repeatable(policy, _route, layer, step)


def _check_exact(policy: TokenRouter) -> None:
    fewer = any(policy.at(step).count(layer, step) < layer.length for layer, step in _cases())
    require(policy.exact != fewer, f"{name_of(policy)}: says it is {'' if policy.exact else 'not '}exact")


_CHECKS: tuple[Callable[[TokenRouter], None], ...] = (_check_route, _check_repeatable, _check_exact)
