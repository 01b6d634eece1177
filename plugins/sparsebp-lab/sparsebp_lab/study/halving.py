"""Successive halving: train every combination for a part of its steps, and continue only the best.

Kevin Jamieson, Ameet Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016,
https://arxiv.org/abs/1502.07943. Ours ranks at evaluations that the recipe has anyway, each trial under the schedule of
its whole length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe import Recipe
from sparsebp_lab.study.decisive import find_interval
from sparsebp_lab.study.schema import FEWEST_STEPS

Item = TypeVar("Item")


@dataclass(frozen=True)
class Standing(Generic[Item]):
    """How far a combination may go now."""

    item: Item
    rung: int | None  # the rung at which it stops; None: none, it trains to its end
    is_cut: bool  # others were better there, so it does not continue


def find_rungs(recipe: Recipe, count: int, reduction: int) -> list[int]:
    """Return the steps after which a recipe's combinations are ranked, in order. These are the last evaluations before
    a ``reduction``-th of the steps, a ``reduction``-th of that, and so on while combinations are left to cut. Raise
    UsageError if none has at least ten steps."""
    steps, every = recipe.training.max_steps, find_interval(recipe)
    rungs: list[int] = []
    share = reduction
    while every and share <= count * (reduction - 1) and (step := steps // share // every * every) >= FEWEST_STEPS:
        rungs.append(step)
        share *= reduction
    if not rungs and count > 1:
        how = "measure.eval_every" if every == recipe.measure.eval_every else "measure.generate.every"
        raise UsageError(
            f"arm {recipe.name}: to rank trials, halving needs an evaluation between step {FEWEST_STEPS} and step "
            f"{steps // reduction} of {steps}, but {how} is {'null' if every is None else every}"
        )
    return sorted(set(rungs))


def halve(
    items: Sequence[Item], num_rungs: int, reduction: int, measure: Callable[[Item, int], float | None]
) -> list[Standing[Item]]:
    """Return how far each of an arm's combinations may go. ``measure`` returns a value at a rung, lower is better;
    infinite for a diverged one, None for one that has not arrived: all wait for it. Of ``n``, the best ``n /
    reduction`` continue, rounded up; ties go to the first."""
    left = [*range(len(items))]
    found: dict[int, Standing[Item]] = {}
    for rung in range(num_rungs):
        values = {place: measure(items[place], rung) for place in left}
        known = [(value, place) for place, value in values.items() if value is not None]
        if len(known) < len(left):
            found |= {place: Standing(items[place], rung, is_cut=False) for place in left}
            break
        kept = {place for _, place in sorted(known)[: math.ceil(len(left) / reduction)]}
        found |= {place: Standing(items[place], rung, is_cut=True) for place in left if place not in kept}
        left = sorted(kept)
    else:
        found |= {place: Standing(items[place], None, is_cut=False) for place in left}
    return [found[place] for place in range(len(items))]
