"""Test by betting whether a mean is above zero; this needs no model of the noise, only a worst case.

A bettor begins with a capital of 1 and stakes a fraction of it on each gain, chosen from earlier gains. A gain is
clipped to the worst case in both directions, so the capital cannot fall below zero. If the mean of the clipped gains is
not above zero given the past, the capital is a supermartingale. The probability that it ever reaches 1/a is then at
most a, however often one looks (I. Waudby-Smith and A. Ramdas, Estimating means of bounded random variables by betting,
2023; the stake is their approximate GRAPA). Pairs may be skewed or heavy-tailed and need not share one distribution.

confseq 0.0.11 compiles C++ with Boost, expectation 0.6 needs Python 3.12, and savvi 0.3 has no bounded means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PRIOR_PAIRS = 4.0  # weight of the expected gain in the first stakes, in pairs
MOST_OF_WORST = 0.99  # fraction of the stake at which the worst case would lose all capital
MOST_SEEDS = 400  # the forecast ends here


def find_stake(total: Floats, squares: Floats, hoped: Floats, spread: Floats, worst: Floats) -> Floats:
    """Return the fraction of the capital to stake on each unit of the next gain.

    Args:
        total: Sum of the earlier clipped gains, of shape (S,).
        squares: Sum of their squares, of shape (S,).
        hoped: Expected mean gain; this and the next two are fixed before the first pair.
        spread: Standard deviation of a pair, as known then.
        worst: Worst case, above 0.

    Returns:
        Fractions of shape (S,), from 0 to just below ``1 / worst``.
    """
    mean = PRIOR_PAIRS * hoped + total
    second = PRIOR_PAIRS * (hoped**2 + spread**2) + squares
    return np.clip(mean / second, 0.0, MOST_OF_WORST / worst)


def log_capital(gains: Sequence[float], worst: float, hoped: float, spread: float) -> float:
    """Return the logarithm of the capital after all gains, from a capital of 1."""
    found, total, squares = 0.0, 0.0, 0.0
    for gain in gains:
        clipped = min(max(gain, -worst), worst)
        stake = find_stake(*np.array([[total], [squares], [hoped], [spread], [worst]]))
        found += math.log1p(float(stake[0]) * clipped)
        total, squares = total + clipped, squares + clipped**2
    return found


def forecast(gains: Sequence[float], worst: float, hoped: float, spread: float, needed: float) -> int | None:
    """Return how many further pairs would reach ``needed``, the logarithm of the capital, if each gained the mean; None
    with fewer than two pairs, without a gain, or beyond 400 in all."""
    mean = math.fsum(gains) / len(gains) if len(gains) > 1 else 0.0
    if mean <= 0.0:
        return None
    for count in range(1, MOST_SEEDS - len(gains) + 1):
        if log_capital([*gains, *[mean] * count], worst, hoped, spread) >= needed:
            return count
    return None


def bound_share(count: int, level: float) -> float:
    """Return the bound on the fraction of ruined seeds after ``count`` seeds without ruin, valid at every look."""
    return 1.0 - level ** (1.0 / count) if count else 1.0
