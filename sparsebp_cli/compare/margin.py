"""Not worse by more than a margin: yes, no, or not to be said yet, and then about how many seeds more would say it.

The null hypothesis is that the true difference lies exactly on the margin. A two-sided t test of it, corrected like
the others for the number of groups, decides for the side on which the mean lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparsebp_cli.compare.statistics import Difference, holm
from sparsebp_cli.errors import UsageError

POWER = 0.8  # chance that so many seeds decide, were the true difference the observed one
MOST_SEEDS = 200
LEVEL = 0.05


@dataclass(frozen=True)
class NotWorse:
    """Whether a group is not worse than the baseline by more than a margin.

    Args:
        margin: In the metric's unit, above 0.
        answer: ``yes``, ``no`` or ``inconclusive``.
        p: Of the test, before correction; None when none could be made.
        p_holm: After correction over all groups; None where there is nothing to correct.
        more_seeds: About how many more shared seeds would decide, at the mean and spread seen so far; None when the
            answer is there, cannot be foretold, or would take more than 200.
    """

    margin: float
    answer: Literal["yes", "no", "inconclusive"]
    p: float | None = None
    p_holm: float | None = None
    more_seeds: int | None = None


def parse_margin(text: str, option: str = "--margin") -> tuple[str | None, float]:
    """Read ``eval/loss=0.01`` or ``0.01``.

    Args:
        text: What the user wrote.
        option: Of the command line, for errors.

    Returns:
        The metric, None when not named; and the margin.

    Raises:
        UsageError: Not of this form, or not above 0.
    """
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0.0) or ("=" in text and not name.strip()):
        raise UsageError(f"{option} must be a number above 0 or METRIC=NUMBER, such as eval/loss=0.01; got {text!r}")
    return name.strip() or None, value


def decide_all(
    differences: Sequence[Difference | None], margin: float, *, worse_is_up: bool, level: float = LEVEL
) -> list[NotWorse | None]:
    """Answer for every group at once, for the correction needs all of them.

    Args:
        differences: Of each group to the baseline; None where there is none.
        margin: How much worse still counts as not worse, above 0.
        worse_is_up: Whether a larger value is a worse one.
        level: Chance of any wrong answer, in (0, 1).

    Returns:
        In the same order.
    """
    raw = [None if d is None else _test(_worsening(d, worse_is_up), d, margin) for d in differences]
    corrected = holm(raw) if sum(p is not None for p in raw) > 1 else [None] * len(raw)
    found: list[NotWorse | None] = []
    for difference, p, p_holm in zip(differences, raw, corrected, strict=True):
        if difference is None:
            found.append(None)
            continue
        worsening = _worsening(difference, worse_is_up)
        decision = NotWorse(margin, "inconclusive", p, p_holm)
        decisive = p if p_holm is None else p_holm
        if difference.low == difference.high == 0.0:
            decision = NotWorse(margin, "yes")
        elif decisive is not None and decisive < level:
            decision = replace(decision, answer="yes" if worsening < margin else "no")
        elif p is not None and difference.sd is not None:
            tests = sum(x is not None for x in raw)
            needed = seeds_needed(abs(worsening - margin) / difference.sd, difference.n, level / tests)
            decision = replace(decision, more_seeds=None if needed is None else needed - difference.n)
        found.append(decision)
    return found


def seeds_needed(effect: float, already: int, level: float = LEVEL) -> int | None:
    """Return how many pairs decide with a chance of 80%, by the noncentral t distribution.

    Args:
        effect: Distance of the mean from the margin, in standard deviations of the pairs; not negative.
        already: Pairs that there are; the answer is more than these.
        level: Of the two-sided test, in (0, 1).

    Returns:
        Pairs in all, or None when 200 are not enough.
    """
    from scipy import stats

    def decides(n: int) -> bool:
        return bool(stats.nct.sf(stats.t.ppf(1 - level / 2, n - 1), n - 1, effect * math.sqrt(n)) >= POWER)

    low, high = already, MOST_SEEDS
    if effect == 0.0 or high <= low or not decides(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def _worsening(difference: Difference, worse_is_up: bool) -> float:
    return difference.mean if worse_is_up else -difference.mean


def _test(worsening: float, difference: Difference, margin: float) -> float | None:
    from scipy import stats

    if difference.p is None or not difference.sd:
        return None
    standard_error = difference.sd / math.sqrt(difference.n)
    return float(2 * stats.t.sf(abs(worsening - margin) / standard_error, difference.n - 1))
