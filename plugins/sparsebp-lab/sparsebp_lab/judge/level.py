"""Assign levels to questions, so that the probability of any false keep is bounded over endlessly many questions.

Each question whose candidate passes the screen takes the first free place in a sequence of levels that sums to 5%. A
kept candidate gives its place back, since only the first false keep matters (J. Tian and A. Ramdas, Online control of
the familywise error rate, 2021: the online fallback). A candidate that is not kept has spent its place. A proposer may
have seen all earlier results, but the deciding pairs use seeds that nobody has seen. So each false keep has at most the
probability of its level given all the past. The levels sum to 5%, however many judges work at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

LEVEL = 0.05  # probability of any false keep
FIRST = 4  # a larger value moves probability to later places; chosen by benchmarks/judge.py


def find_level(place: int) -> float:
    """Return the level of a place, from 1; all levels sum to 5%, the first K to 5% * K / (K + 5)."""
    return LEVEL * (FIRST + 1) / ((place + FIRST) * (place + FIRST + 1))


def find_needed(place: int) -> float:
    """Return the logarithm of the evidence that a candidate needs at a place."""
    return -math.log(find_level(place))


def find_free(taken: Collection[int]) -> int:
    """Return the first place that is not taken."""
    place = 1
    while place in taken:
        place += 1
    return place
