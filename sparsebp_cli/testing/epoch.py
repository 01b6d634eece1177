"""Conformance suite of epoch selectors. Each broken promise is an ``AssertionError`` of one sentence.

Shape letters: N examples, K visited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from sparsebp_cli.policy import Epoch, EpochSelector, Stateful, Step, Visits, make_policy
from sparsebp_cli.testing.promise import enough, name_of, require
from sparsebp_cli.testing.suite import check_repeatable, find_share, same

_NUM_STEPS = 40
_NUM_DRAWS = 400
_NUM_SIGMAS = 6.0  # the draws are fixed by the seed


def check_epoch_selector(policy: EpochSelector) -> None:
    """Check an epoch selector against every promise of the contract, with training splits of 1, 2, 9 and 24 examples.
    None, some or all of the examples were trained on before."""
    require(not isinstance(policy, Stateful), f"{name_of(policy)}: an epoch selector cannot have a state")
    for check in _CHECKS:
        check(policy)


def _check_visits(policy: EpochSelector) -> None:
    name = name_of(policy)
    for epoch, step in _cases():
        visits, number = _choose(policy, epoch, step), len(epoch.loss_N)
        if visits is None:
            continue
        index_K, weight_K = visits.index_K, visits.weight_K
        good = index_K.dtype == torch.int64 and index_K.ndim == 1 and index_K.numel() > 0
        require(good, f"{name}: visited examples must be one dimension of int64, at least one")
        rows = index_K.tolist()
        good = rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < number
        require(good, f"{name}: must visit rows in [0, {number}), ascending, each once, got {rows}")
        good = weight_K.dtype == torch.float32 and weight_K.shape == index_K.shape
        require(good, f"{name}: needs one weight of float32 for each visited example")
        good = bool((weight_K.isfinite() & (weight_K > 0.0)).all())
        require(good, f"{name}: weights must be finite and greater than 0, got {weight_K.tolist()}")


def _check_repeatable(policy: EpochSelector) -> None:
    for epoch, step in _cases():
        check_repeatable(policy, _choose, epoch, step)


def _check_draws(policy: EpochSelector) -> None:
    def differing(change: Callable[[Epoch, Step, int], tuple[Epoch, Step]], numbers: Iterable[int]) -> Iterator[bool]:
        for number in numbers:
            for epoch, step in _cases():
                yield not same(_choose(policy, epoch, step), _choose(policy, *change(epoch, step, number)))

    share = find_share(differing(lambda epoch, step, number: (epoch, replace(step, draw=number)), count(1)))
    if share is None:
        return  # not a random policy
    numbers = range(1, 2 + enough(share) // len(list(_cases())))
    text = f"{name_of(policy)}: is random, but draws the same for every"
    other_seeds = differing(lambda epoch, step, number: (epoch, replace(step, seed=step.seed + number)), numbers)
    require(any(other_seeds), f"{text} seed")
    later = differing(
        lambda epoch, step, number: (
            replace(epoch, number=epoch.number + number),
            replace(step, index=step.index + number),
        ),
        numbers,
    )
    require(any(later), f"{text} epoch")


def _check_exact(policy: EpochSelector) -> None:
    for epoch, step in _cases():
        visits = _choose(policy, epoch, step)
        dense = visits is None or (len(visits.index_K) == len(epoch.loss_N) and bool((visits.weight_K == 1.0).all()))
        require(dense or not policy.exact, f"{name_of(policy)}: declares exact, but selects in epoch {epoch.number}")


def _check_unbiased(policy: EpochSelector) -> None:
    require(policy.unbiased or not policy.exact, f"{name_of(policy)}: declares exact, but not unbiased")
    if not policy.unbiased:
        return
    for epoch, step in _cases():
        if len(epoch.loss_N) != 9 or _choose(policy, epoch, step) is None:
            continue
        weight_DN = torch.stack([_weights(policy, epoch, replace(step, draw=draw)) for draw in range(_NUM_DRAWS)])
        error_N = (weight_DN.mean(0) - 1.0).abs()
        allowed_N = _NUM_SIGMAS * weight_DN.std(0) / math.sqrt(_NUM_DRAWS) + 1e-6
        worst = int((error_N - allowed_N).argmax())
        text = (
            f"{name_of(policy)}: declares unbiased, but the mean weight of an example is {weight_DN.mean(0)[worst]:g}"
        )
        require(bool((error_N <= allowed_N).all()), text)


def _check_control(policy: EpochSelector) -> None:
    entry = policy.control
    if entry is None:
        return
    control = make_policy(str(entry["name"]), **{key: value for key, value in entry.items() if key != "name"})
    assert isinstance(control, EpochSelector)
    for epoch, step in _cases():
        mine, other = (int((_weights(one, epoch, step) > 0.0).sum()) for one in (policy, control))
        require(mine == other, f"{name_of(policy)}: visits {mine} examples of an epoch, but its control visits {other}")


def _choose(policy: EpochSelector, epoch: Epoch, step: Step) -> Visits | None:
    return policy.at(step).choose(epoch, step)


def _weights(policy: EpochSelector, epoch: Epoch, step: Step) -> Tensor:
    """Return the weight of every example, 0 for an example that is left out."""
    visits, number = _choose(policy, epoch, step), len(epoch.loss_N)
    if visits is None:
        return torch.ones(number, dtype=torch.float64)
    return torch.zeros(number, dtype=torch.float64).index_put((visits.index_K,), visits.weight_K.double())


def _cases() -> Iterator[tuple[Epoch, Step]]:
    """Yield epochs from the first to the last of a training. Some losses are equal and some are missing."""
    for size in (1, 2, 9, 24):
        for number, seen in ((0, 0.0), (1, 0.7), (2, 1.0), (5, 1.0), (9, 1.0)):
            generator = torch.Generator().manual_seed(100 * size + number)
            loss_N = torch.rand(size, generator=generator).mul(8).round() + 1.0  # a loss of 0 might never be drawn
            loss_N[torch.rand(size, generator=generator) >= seen] = torch.nan
            before, in_all = number * size, 10 * size
            step = Step(before * _NUM_STEPS // in_all, seed=1, num_steps=_NUM_STEPS)
            yield Epoch(number, loss_N, before, in_all), step


_CHECKS: tuple[Callable[[EpochSelector], None], ...] = (
    _check_visits,
    _check_repeatable,
    _check_draws,
    _check_exact,
    _check_unbiased,
    _check_control,
)
