"""Conformance suite of example selectors. Each broken promise is an ``AssertionError`` of one sentence.

Shape letters: B examples, K kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sparsebp_cli.policy import Examples, ExampleSelector, Step
from sparsebp_cli.testing.promise import name_of, random_states, require, through_json, vary
from sparsebp_cli.testing.state import check_state, first_state

_NUM_STEPS = 24


def check_example_selector(policy: ExampleSelector) -> None:
    """Check an example selector against every promise of the contract."""
    check_state(policy, ())
    _check_choice(policy)
    _check_budget(policy)
    _check_repeatable(policy)
    _check_draws(policy)
    _check_exact(policy)
    _check_resume(policy)


def _check_choice(policy: ExampleSelector) -> None:
    name = name_of(policy)
    require(0.0 < policy.scored_share <= 1.0, f"{name}: scored_share must be in (0, 1], got {policy.scored_share}")
    for examples, step in _cases(policy):
        index_K = policy.choose(examples, step)
        if index_K is None:
            continue
        good = index_K.dtype == torch.int64 and index_K.ndim == 1 and index_K.numel() > 0
        require(good, f"{name}: chosen examples must be one dimension of int64, at least one")
        numbers = index_K.tolist()
        good = numbers == sorted(set(numbers)) and numbers[0] >= 0 and numbers[-1] < examples.number
        require(good, f"{name}: must choose numbers in [0, {examples.number}), ascending, each once, got {numbers}")


def _check_budget(policy: ExampleSelector) -> None:
    name, budget = name_of(policy), policy.budget
    require(0.0 < budget <= 1.0, f"{name}: budget must be in (0, 1], got {budget}")
    for examples, step in _cases(policy):
        index_K = policy.choose(examples, step)
        most = max(1, math.ceil(budget * examples.number - 1e-9))
        kept = examples.number if index_K is None else index_K.numel()
        good = index_K is None or kept <= most
        require(good, f"{name}: chooses {kept} of {examples.number} examples, its budget {budget} allows {most}")


def _check_repeatable(policy: ExampleSelector) -> None:
    for examples, step in _cases(policy):
        before, states = None if examples.loss_B is None else examples.loss_B.clone(), random_states()
        first = policy.choose(examples, step)
        require(states == random_states(), f"{name_of(policy)}: uses a global random generator: use step.generator")
        require(_same(before, examples.loss_B), f"{name_of(policy)}: changes the losses that it receives")
        again = policy.choose(examples, step)
        require(_same(first, again), f"{name_of(policy)}: decides differently when called again at the same step")


def _check_draws(policy: ExampleSelector) -> None:
    def differs(what: str, numbers: range) -> bool:
        return any(
            not _same(policy.choose(examples, step), policy.choose(examples, other))
            for examples, step in _cases(policy)
            for other in vary(step, what, numbers)
        )

    if not differs("draw", range(1, 5)):
        return  # not a random policy
    for what in ("micro_batch", "seed", "rank"):
        text = f"{name_of(policy)}: is random but draws the same for every {what} of the step"
        require(differs(what, range(1, 5)), text)
    for number in {examples.number for examples, _ in _cases(policy) if examples.number > 2}:
        same_batch = [(e, s) for e, s in _cases(policy) if e.number == number]
        chosen = [policy.choose(replace(e, loss_B=_loss(policy, number, s)), s) for e, s in same_batch]
        different = {tuple(index_K.tolist()) for index_K in chosen if index_K is not None}
        text = f"{name_of(policy)}: is random but draws the same for every index of the step"
        require(len(different) != 1 or policy.budget * number < 1, text)


def _check_exact(policy: ExampleSelector) -> None:
    require(policy.exact or not policy.unbiased, f"{name_of(policy)}: a mean over targets of chosen examples is biased")
    for examples, step in _cases(policy):
        dense = not policy.exact or policy.choose(examples, step) is None
        require(dense, f"{name_of(policy)}: says it is exact, but chooses at step {step.index}")


def _check_resume(policy: ExampleSelector) -> None:
    used = through_json(policy)
    for examples, step in _cases(policy):
        mine, copied = used.choose(examples, step), through_json(policy).choose(examples, step)
        require(_same(mine, copied), f"{name_of(policy)}: a resumed run decides differently: it keeps its own state")


def _cases(policy: ExampleSelector) -> Iterator[tuple[Examples, Step]]:
    """Yield batches of several sizes at several steps, with losses only if the policy needs them."""
    for index in range(_NUM_STEPS):
        step = Step(index, seed=1, num_steps=_NUM_STEPS if policy.needs_num_steps else None, state=first_state(policy))
        for number in (1, 2, 7, 16):
            yield Examples(number, _loss(policy, number, step)), step


def _loss(policy: ExampleSelector, number: int, step: Step) -> Tensor | None:
    """Return losses of which some are equal."""
    if not policy.needs_loss(step):
        return None
    return torch.rand(number, generator=torch.Generator().manual_seed(number)).mul(8).round()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
