"""Conformance suite of block droppers. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import sqrt

from sparsebp_cli.policy import BlockDropper, ResidualBlock, Step
from sparsebp_cli.testing.promise import name_of, random_states, require, through_json

NUM_STEPS = 400
_NUM_SIGMAS = 6.0  # the draws are fixed by the seed; a good policy fails for one seed in 500 million


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
    """Check a block dropper against every promise of the contract, with models of one, four and seven layers, each of
    an attention ``layers.0.self_attn`` and an MLP ``layers.0.mlp``."""
    for check in _CHECKS:
        check(policy)


def _drop(policy: BlockDropper, blocks: Sequence[ResidualBlock], index: int) -> frozenset[str]:
    return frozenset(policy.drop(blocks, Step(index, num_steps=NUM_STEPS)))


def _check_choice(policy: BlockDropper) -> None:
    for blocks in MODELS:
        names = {block.name for block in blocks}
        for index in range(12):
            chosen = policy.drop(blocks, Step(index, num_steps=NUM_STEPS))
            good = isinstance(chosen, Collection) and not isinstance(chosen, str) and set(chosen) <= names
            require(good, f"{name_of(policy)}: drop must return names that it received, got {chosen!r}")
            require(len(set(chosen)) == len(chosen), f"{name_of(policy)}: names a block twice at step {index}")


def _check_repeatable(policy: BlockDropper) -> None:
    for blocks in MODELS:
        for index in range(12):
            states = random_states()
            first = _drop(policy, blocks, index)
            require(states == random_states(), f"{name_of(policy)}: uses a global random generator: use step.generator")
            again = _drop(policy, blocks, index)
            require(first == again, f"{name_of(policy)}: decides differently when called again at the same step")
            text = f"{name_of(policy)}: a resumed run decides differently: it keeps its own state"
            require(_drop(through_json(policy), blocks, index) == first, text)


def _check_budget(policy: BlockDropper) -> None:
    require(0.0 < policy.budget <= 1.0, f"{name_of(policy)}: budget must be in (0, 1], got {policy.budget}")
    for blocks in MODELS:
        shares = [1.0 - len(_drop(policy, blocks, index)) / len(blocks) for index in range(NUM_STEPS)]
        mean = sum(shares) / len(shares)
        variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
        allowed = _NUM_SIGMAS * sqrt(variance / len(shares)) + 1e-9
        text = (
            f"{name_of(policy)}: of {len(blocks)} blocks, {mean:.3f} have a backward on average, its budget is "
            f"{policy.budget:g}"
        )
        require(abs(mean - policy.budget) <= allowed, text)


def _check_exact(policy: BlockDropper) -> None:
    dropped = any(_drop(policy, blocks, index) for blocks in MODELS for index in range(NUM_STEPS))
    require(policy.exact != dropped, f"{name_of(policy)}: says it is {'' if policy.exact else 'not '}exact")


_CHECKS: tuple[Callable[[BlockDropper], None], ...] = (_check_choice, _check_repeatable, _check_budget, _check_exact)
