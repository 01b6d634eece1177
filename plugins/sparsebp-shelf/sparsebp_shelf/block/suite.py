"""Check that a block dropper keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

import torch

from sparsebp_cli.policy import Observed, ParameterGradient, Stateful, Step, TrialPass
from sparsebp_cli.testing import check_repeatable, check_state, enough, name_of, require
from sparsebp_shelf.block.kind import BlockDropper, ResidualBlock

if TYPE_CHECKING:
    from sparsebp_cli.policy import State

NUM_STEPS, MOST_STEPS = 400, 20_000
_NUM_SIGMAS = 6.0  # seeds fix the draws; a correct policy fails for one seed in 500 million


def _blocks(num_layers: int) -> tuple[ResidualBlock, ...]:
    pairs = (
        (
            ResidualBlock(f"layers.{layer}.self_attn", layer, "attention", 256),
            ResidualBlock(f"layers.{layer}.mlp", layer, "mlp", 512),
        )
        for layer in range(num_layers)
    )
    return tuple(block for pair in pairs for block in pair)


MODELS: tuple[Sequence[ResidualBlock], ...] = (_blocks(1), _blocks(4), _blocks(7))


def check_block_dropper(policy: BlockDropper) -> None:
    """Check a block dropper against every promise of the contract, on models of one, four and seven layers.

    Each layer has an attention, such as ``layers.0.self_attn``, and an MLP, such as ``layers.0.mlp``.
    """
    for blocks in MODELS:
        check_state(policy, blocks, partial(_show, blocks))
    for check in _CHECKS:
        check(policy)


def _show(blocks: Sequence[ResidualBlock], seed: int) -> list[Observed]:
    generator = torch.Generator().manual_seed(seed)
    return [ParameterGradient(block.name, torch.rand(6, generator=generator)) for block in blocks]


def _cases(policy: BlockDropper) -> Iterator[tuple[Sequence[ResidualBlock], State]]:
    """Yield blocks with each state that the policy may have: the initial one, and the one after trial passes."""
    for blocks in MODELS:
        state: State = policy.init(blocks) if isinstance(policy, Stateful) else {}
        yield blocks, state
        if isinstance(policy, Stateful) and policy.has_trials:
            yield blocks, _try(policy, blocks, state)


def _try(policy: BlockDropper, blocks: Sequence[ResidualBlock], state: State) -> State:
    """Return the state after trial passes in which each block's parameter has a gradient, unless it is dropped."""
    assert isinstance(policy, Stateful)
    step = next((s for index in range(NUM_STEPS) if policy.wants_trials(s := _at(index, state))), None)
    require(step is not None, f"{name_of(policy)}: has_trials is true, but wants_trials requests no trial at any step")
    assert step is not None
    names = {block.name for block in blocks}
    decisions = [frozenset(tried) for tried in policy.wants_trials(step) if not isinstance(tried, TrialPass)]
    require(all(tried <= names for tried in decisions), f"{name_of(policy)}: wants_trials names unknown blocks")
    sizes = torch.rand(len(blocks), generator=torch.Generator().manual_seed(0))
    shown = [ParameterGradient(block.name, size) for block, size in zip(blocks, sizes, strict=True)]
    seen = [policy.look([one for one in shown if one.name not in tried], step) for tried in decisions]
    after = policy.observe_trials(state, seen, step)
    require(after == policy.observe_trials(state, seen, step), f"{name_of(policy)}: observe_trials is not repeatable")
    require(after.keys() == state.keys(), f"{name_of(policy)}: observe_trials returns other entries than init")
    return after


def _at(index: int, state: State) -> Step:
    return Step(index, num_steps=NUM_STEPS, state=state)


def _drop(policy: BlockDropper, blocks: Sequence[ResidualBlock], index: int, state: State) -> frozenset[str]:
    return frozenset(policy.drop(blocks, _at(index, state)))


def _check_choice(policy: BlockDropper) -> None:
    for blocks, state in _cases(policy):
        names = {block.name for block in blocks}
        for index in range(12):
            chosen = policy.drop(blocks, _at(index, state))
            good = isinstance(chosen, Collection) and not isinstance(chosen, str) and set(chosen) <= names
            require(good, f"{name_of(policy)}: drop must return only names that it received, got {chosen!r}")
            require(len(set(chosen)) == len(chosen), f"{name_of(policy)}: names a block twice at step {index}")


def _check_repeatable(policy: BlockDropper) -> None:
    for blocks, state in _cases(policy):
        for index in range(12):
            check_repeatable(policy, _drop, blocks, index, state)


def _check_budget(policy: BlockDropper) -> None:
    require(0.0 < policy.budget <= 1.0, f"{name_of(policy)}: budget must be in (0, 1], got {policy.budget}")
    for number, (blocks, state) in enumerate(_cases(policy)):
        # After trial passes the budget is an upper limit on the fraction of the work.
        is_work = isinstance(policy, Stateful) and policy.has_trials and number % 2 == 1
        sizes = {block.name: block.num_weights if is_work else 1 for block in blocks}
        dropped = [sum(sizes[name] for name in _drop(policy, blocks, index, state)) for index in range(NUM_STEPS)]
        shares = [1.0 - size / sum(sizes.values()) for size in dropped]
        wanted = policy.budget
        mean = sum(shares) / len(shares)
        variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
        allowed = _NUM_SIGMAS * sqrt(variance / len(shares)) + 1e-9
        text = (
            f"{name_of(policy)}: of {len(blocks)} blocks, {mean:.3f} have a backward on average, but its budget is "
            f"{wanted:g}"
        )
        require(mean - wanted <= allowed and (is_work or wanted - mean <= allowed), text)


def _check_exact(policy: BlockDropper) -> None:
    # With a budget near 1 the policy rarely drops blocks, so the check runs more steps.
    left_out = 1.0 - policy.budget
    num_steps = max(NUM_STEPS, min(enough(left_out), MOST_STEPS)) if left_out > 0 else NUM_STEPS
    dropped = any(_drop(policy, blocks, index, state) for blocks, state in _cases(policy) for index in range(num_steps))
    does = "drops" if dropped else "never drops"
    require(policy.exact != dropped, f"{name_of(policy)}: exact is {policy.exact}, but it {does} blocks")


_CHECKS: tuple[Callable[[BlockDropper], None], ...] = (
    _check_choice,
    _check_repeatable,
    _check_budget,
    _check_exact,
)
