"""Conformance suite of token selectors. Each broken promise is an ``AssertionError`` of one sentence.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsebp_cli.policy import Step, TokenChoice, Tokens, TokenSelector
from sparsebp_cli.testing.promise import name_of, require, through_json
from sparsebp_cli.testing.state import check_state, first_state
from sparsebp_cli.testing.suite import check_draws, check_repeatable, same

_NUM_DRAWS = 400
_NUM_SIGMAS = 6.0  # an unbiased policy fails for one in 500 million entries, and the seeds are fixed


def check_token_selector(policy: TokenSelector) -> None:
    """Check a token selector against every promise of the contract."""
    check_state(policy, ())
    _check_choice(policy)
    _check_repeatable(policy)
    _check_budget(policy)
    _check_draws(policy)
    _check_exact(policy)
    _check_unbiased(policy)
    _check_resume(policy)


def _check_choice(policy: TokenSelector) -> None:
    name = name_of(policy)
    for tokens in _batches(policy):
        for step in (Step(0, state=first_state(policy)), _late(policy)):
            choice = policy.choose(tokens, step)
            for what, chosen_BT in (("trained_BT", choice.trained_BT), ("carries_BT", choice.carries_BT)):
                good = chosen_BT.dtype == torch.bool and chosen_BT.shape == tokens.target_BT.shape
                require(good, f"{name}: {what} must be boolean and {tuple(tokens.target_BT.shape)}")
            inside = not bool((choice.trained_BT & ~tokens.target_BT).any())
            require(inside, f"{name}: trains a position that is no target")
            inside = not bool((choice.carries_BT & ~tokens.real_BT).any())
            require(inside, f"{name}: carries_BT marks padding")
            carried = not bool((choice.trained_BT & ~choice.carries_BT).any())
            require(carried, f"{name}: carries_BT lacks a trained position")


def _check_repeatable(policy: TokenSelector) -> None:
    for tokens in _batches(policy):
        check_repeatable(policy, _choose, tokens)


def _check_budget(policy: TokenSelector) -> None:
    budget = policy.budget
    if budget is None:
        return
    require(0.0 < budget <= 1.0, f"{name_of(policy)}: budget must be in (0, 1], got {budget}")
    for tokens in _batches(policy):
        trained = int(policy.choose(tokens, _late(policy)).trained_BT.sum())
        number_B = [number for number in tokens.target_BT.sum(1).tolist() if number]
        least = sum(math.floor(budget * number + 1e-9) for number in number_B)
        most = sum(max(1, math.ceil(budget * number - 1e-9)) for number in number_B)
        text = f"{name_of(policy)}: trains {trained} of {sum(number_B)} targets, but budget {budget} allows {least} to"
        require(least <= trained <= most, f"{text} {most}")


def _check_draws(policy: TokenSelector) -> None:
    asked = [(partial(policy.choose, tokens), _late(policy)) for tokens in _batches(policy)]
    check_draws(policy, asked, ("index", "micro_batch", "seed", "rank"))


def _check_exact(policy: TokenSelector) -> None:
    if not policy.exact:
        return
    for tokens in _batches(policy):
        for step in (Step(0, state=first_state(policy)), _late(policy)):
            choice = policy.choose(tokens, step)
            flows = policy.mode == "exact" or torch.equal(choice.carries_BT, tokens.real_BT)
            dense = flows and torch.equal(choice.trained_BT, tokens.target_BT)
            require(dense, f"{name_of(policy)}: declares exact, but trains differently from dense")


def _check_unbiased(policy: TokenSelector) -> None:
    """Check that the expected factor of each target in the loss equals its factor in dense training."""
    if not policy.unbiased:
        return
    for tokens in _batches(policy):
        if not tokens.target_BT.any():
            continue
        choices = [policy.choose(tokens, replace(_late(policy), draw=draw)) for draw in range(1, _NUM_DRAWS + 1)]
        flows = policy.mode == "exact" or all(torch.equal(c.carries_BT, tokens.real_BT) for c in choices)
        require(flows, f"{name_of(policy)}: declares unbiased, but carries_BT lacks positions")
        parts = torch.stack([_parts(choice) for choice in choices])
        wanted = tokens.target_BT.double() / tokens.target_BT.sum()
        bound = _NUM_SIGMAS * parts.std(0) / math.sqrt(_NUM_DRAWS) + 1e-9
        worst = float(((parts.mean(0) - wanted).abs() - bound).max())
        require(worst <= 0, f"{name_of(policy)}: declares unbiased, but trains some targets more often than others")


def _parts(choice: TokenChoice) -> Tensor:
    """Return the factor of each position's loss in the loss of the batch."""
    return choice.trained_BT.double() / choice.trained_BT.sum()


def _check_resume(policy: TokenSelector) -> None:
    fresh = [through_json(policy).choose(tokens, _late(policy)) for tokens in _batches(policy)]
    used = through_json(policy)
    for index in range(3):
        for tokens in _batches(policy):
            used.choose(tokens, Step(index, state=first_state(policy)))
    later = [used.choose(tokens, _late(policy)) for tokens in _batches(policy)]
    require(same(fresh, later), f"{name_of(policy)}: decides differently in a resumed run: it keeps hidden state")


def _choose(policy: TokenSelector, tokens: Tokens) -> TokenChoice:
    return policy.choose(tokens, _late(policy))


def _late(policy: TokenSelector) -> Step:
    """Return a step after warm-up schedules."""
    return Step(100_000, seed=1, num_steps=200_000, state=first_state(policy))


def _batches(policy: TokenSelector) -> Iterator[Tokens]:
    """Yield batches: examples of one length; of several lengths, padded left and right, with masked prompts; one
    target; no target. They have only the scores and columns that the policy declares."""
    generator = torch.Generator().manual_seed(0)
    for number, (num_examples, length) in enumerate(((2, 9), (3, 16), (1, 8), (2, 8))):
        ids_BT = torch.randint(0, 50, (num_examples, length), generator=generator)
        real_BT = torch.ones(num_examples, length, dtype=torch.bool)
        target_BT = real_BT.clone()
        if number == 1:
            real_BT[0, 12:], real_BT[1, :4] = False, False
            target_BT = real_BT & (torch.arange(length) > 5)
            target_BT[0, 11] = False
        elif number == 2:
            target_BT = torch.arange(length)[None] == 3
        elif number == 3:
            target_BT = torch.zeros_like(real_BT)
        target_BT[:, -1] = False
        scores = {
            name: torch.randn(ids_BT.shape, generator=generator).abs().masked_fill(~target_BT, 0.0)
            for name in sorted(policy.needs)
        }
        columns = {name: torch.randint(0, 2, ids_BT.shape, generator=generator) for name in sorted(policy.reads)}
        yield Tokens(ids_BT, target_BT, real_BT, scores, columns)
