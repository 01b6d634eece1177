"""Estimate the error of what tuning chose: a tuned value is random, and a statement about methods must include this.

It is a bootstrap over the noise of tuning. The mean of each combination over the tuning seeds is drawn again, and the
best combination is chosen again. The error of an arm is the root mean square of the difference between the new and the
original choice, in the observed means. The noise is that of each combination, pooled over arms, without effects that a
seed has on all of them: the corners of a grid may differ sixfold. An arm that is noisier than the others gets noise
scaled by that factor. The noise counts twice, because the means around which it is drawn are themselves drawn. In
``benchmarks/tuning.py`` at most 5 % of studies make a false statement this way. More do if the choice is ignored, with
a bootstrap of the seeds, or with rates chosen by leaving out one seed in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

DRAWS = 1000
FEWEST_SEEDS = 2  # tuning seeds; one seed does not show the noise


def find_choice_errors(
    chosen_by: Mapping[str, np.ndarray],
    values: Mapping[str, np.ndarray],
    combinations: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, float]:
    """Return the standard error of each arm's choice in the unit of ``values``; infinite with one tuning seed.

    Both mappings map an arm to an array of (combinations, seeds): the deciding metric, lower being better, and the
    validation counterpart of the reported metric. ``combinations`` names the rows of each arm; without it all arms have
    the same rows. Combinations that diverged are left out.
    """
    import numpy as np

    arms = {arm: by for arm, by in chosen_by.items() if len(by) > 1}
    if not arms:
        return dict.fromkeys(chosen_by, 0.0)
    num_seeds = next(iter(arms.values())).shape[1]
    if num_seeds < FEWEST_SEEDS:
        return {arm: math.inf if arm in arms else 0.0 for arm in chosen_by}
    rest = {arm: by - by.mean(1, keepdims=True) for arm, by in arms.items()}
    of_seed = np.concatenate([*rest.values()]).mean(0)  # the seed's effect on all combinations changes no choice
    named = {arm: combinations[arm] if combinations else [*map(str, range(len(by)))] for arm, by in arms.items()}
    squares = {arm: ((own - of_seed) ** 2).sum(1) for arm, own in rest.items()}
    total = sum(map(len, arms.values()))
    freedom = (total - 1) / total * (num_seeds - 1)  # of each combination of each arm
    of_combination: dict[str, list[float]] = {}
    for arm, names in named.items():
        for name, one in zip(names, squares[arm], strict=True):
            of_combination.setdefault(name, []).append(float(one) / freedom)
    # A fixed seed makes the report reproducible.
    generator, found = np.random.default_rng(0), dict.fromkeys(chosen_by, 0.0)
    for arm, by in arms.items():
        variance = np.array([fmean(of_combination[name]) for name in named[arm]])
        usual = float(variance.sum()) * freedom
        variance *= max(1.0, float(squares[arm].sum()) / usual) if usual else 1.0
        mean, reported = by.mean(1), values[arm].mean(1)
        drawn = mean + generator.standard_normal((DRAWS, len(by))) * np.sqrt(2.0 * variance / num_seeds)
        moved = reported[drawn.argmin(1)] - reported[mean.argmin()]
        found[arm] = float(np.sqrt(np.mean(moved**2)))
    return found
