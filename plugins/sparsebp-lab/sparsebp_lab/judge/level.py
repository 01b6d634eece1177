"""The level at which a question is decided, so that over a line of questions without end nothing false is kept.

Each question whose candidate passes the screen takes the first free place of a sequence of levels that sums to 5%. A
candidate that is kept gives its place back, since only the first false one matters (J. Tian and A. Ramdas, Online
control of the familywise error rate, 2021: the online fallback); one that is not kept has spent it. Whoever proposes
may have seen everything before: the pairs that decide are of seeds that nobody has seen, so each false keep has a
chance of at most its level given all the past, and these sum to 5%, however many judges work at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

LEVEL = 0.05  # chance that anything false is ever kept
FIRST = 4  # larger: less for the first places, more for later ones; chosen by benchmarks/judge.py


def find_level(place: int) -> float:
    """Return the level of a place, from 1: these sum to 5% over all places, and the first K to 5% * K / (K + 5)."""
    return LEVEL * (FIRST + 1) / ((place + FIRST) * (place + FIRST + 1))


def find_needed(place: int) -> float:
    """Return the logarithm of the evidence that keeps a candidate at a place."""
    return -math.log(find_level(place))


def find_free(taken: Collection[int]) -> int:
    """Return the first place that is not taken."""
    place = 1
    while place in taken:
        place += 1
    return place
