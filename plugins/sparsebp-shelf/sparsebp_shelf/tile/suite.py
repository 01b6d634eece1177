"""Check that a tile selector keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparsebp_cli.policy import Step
from sparsebp_cli.testing import check_repeatable, name_of, require
from sparsebp_shelf.tile.kind import AttentionTiles, TileSelector

NUM_STEPS = 400
_STEPS = (0, 57, NUM_STEPS - 1)
_SHAPE = (2, 6, 6)  # heads, tiles of queries, tiles of keys


def check_tile_selector(policy: TileSelector) -> None:
    """Check a tile selector against every promise of the contract, with two heads and six tiles of queries and keys,
    causal and not."""
    for check in _CHECKS:
        check(policy)


def _cases() -> Iterator[tuple[Tensor, AttentionTiles, Step]]:
    generator = torch.Generator().manual_seed(0)
    for example, is_causal in enumerate((False, True)):
        # The factor spreads the weights from nearly all to nearly nothing, as in an attention.
        score_HQK = 4.0 * torch.randn(_SHAPE, generator=generator)
        if is_causal:
            score_HQK.masked_fill_(~torch.ones(_SHAPE[1:], dtype=torch.bool).tril(), -torch.inf)
        for index in _STEPS:
            yield (
                16.0 * score_HQK.softmax(-1),
                AttentionTiles("layers.0.attention", 0, example),
                Step(index, num_steps=NUM_STEPS),
            )


def _check_choice(policy: TileSelector) -> None:
    size = policy.tile_size
    require(type(size) is int and size >= 1, f"{name_of(policy)}: tile_size must be a whole number from 1, got {size}")
    for mass_HQK, tiles, step in _cases():
        before = mass_HQK.clone()
        keep_HQK = policy.at(step).select(mass_HQK, tiles, step)
        text = f"{name_of(policy)}: select must return bool of shape {_SHAPE}"
        require(keep_HQK.dtype == torch.bool and keep_HQK.shape == _SHAPE, text)
        require(
            torch.equal(mass_HQK, before), f"{name_of(policy)}: select changes the attention weights that it receives"
        )


def _select(policy: TileSelector, mass_HQK: Tensor, tiles: AttentionTiles, step: Step) -> Tensor:
    return policy.at(step).select(mass_HQK, tiles, step)


def _check_repeatable(policy: TileSelector) -> None:
    for case in _cases():
        check_repeatable(policy, _select, *case)


def _check_exact(policy: TileSelector) -> None:
    if not policy.exact:
        return
    for mass_HQK, tiles, step in _cases():
        keep_HQK = policy.at(step).select(mass_HQK, tiles, step)
        text = f"{name_of(policy)}: says it is exact, but skips a tile with attention weight"
        require(bool(keep_HQK[mass_HQK > 0.0].all()), text)


_CHECKS: tuple[Callable[[TileSelector], None], ...] = (_check_choice, _check_repeatable, _check_exact)
