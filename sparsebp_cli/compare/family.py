"""Correct statements for their number, and pool the spread that groups share.

With 3 seeds a group's own spread has 2 degrees of freedom, and among 10 groups a difference of 3 standard deviations
occurs in 13% of studies. Groups compared with one baseline on the same seeds mostly have similar spreads. So a
statement uses the **larger of the group's own spread and the one pooled over groups**, with the degrees of freedom of
the pooled variance (F. Satterthwaite, An Approximate Distribution of Estimates of Variance Components, 1946). The
larger one protects a group that varies more than the others. Moderated variances (G. Smyth, Linear Models and Empirical
Bayes Methods, 2004) found false differences there in up to 9% of simulated studies. ``docs/reference/verdicts.md``
gives the gain and its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparsebp_cli.compare.statistics import Difference, holm, quantile_t, two_sided_p

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.05
CLAIMS = "quality, step time and memory"
EQUAL_NOISE = 0.25  # squared correlation of two groups' differences to one baseline, if all three are equally noisy


@dataclass(frozen=True)
class Family:
    """Statements that are corrected together.

    Args:
        name: Subject of the statements.
        statements: Number of statements. The chance that any of them is false is at most 5%.
    """

    name: str
    statements: int


def correct_family(
    kinds: Sequence[Sequence[Difference | None]], *, ratios: Sequence[bool]
) -> list[list[Difference | None]]:
    """Correct statements of several kinds, such as quality and step time, as one family. Each kind has one difference
    per group, None if missing. ``ratios`` says which kinds are ratios. The result has ``p_holm`` and simultaneous
    intervals; a single statement needs neither."""
    shared = [_share_spread(some, ratio=ratio) for some, ratio in zip(kinds, ratios, strict=True)]
    count = count_statements([d for some in shared for d in some])
    if count < 2:
        return [list(some) for some in kinds]
    p_values = holm([_test(d, ratio) for some, ratio in zip(shared, ratios, strict=True) for d in some])
    corrected = iter(p_values)
    return [
        [None if d is None else _widen(d, p, count, ratio=ratio) for d, p in zip(some, corrected, strict=False)]
        for some, ratio in zip(shared, ratios, strict=True)
    ]


def correct_all(differences: Sequence[Difference | None], *, ratio: bool = False) -> list[Difference | None]:
    """Correct differences of one kind for their number, each with its own spread: p (Holm) and matching simultaneous
    intervals. A single statement is unchanged. ``ratio`` says whether they are ratios."""
    count = count_statements(differences)
    if count < 2:
        return list(differences)
    p_values = holm([None if d is None else d.p for d in differences])
    return [None if d is None else _widen(d, p, count, ratio=ratio) for d, p in zip(differences, p_values, strict=True)]


def count_statements(differences: Sequence[Difference | None]) -> int:
    """Return the number of differences that can be tested."""
    return sum(d is not None and d.p is not None for d in differences)


def _share_spread(differences: Sequence[Difference | None], *, ratio: bool) -> list[Difference | None]:
    tested = [d for d in differences if d is not None and d.p is not None and d.sd]
    if len(tested) < 2:
        return list(differences)
    own = [(d.n - 1) for d in tested]
    pooled = math.sqrt(sum(df * (d.sd or 0.0) ** 2 for df, d in zip(own, tested, strict=True)) / sum(own))
    # Do not exceed the degrees of freedom of equal noise. See decision 10.
    df = min(sum(own) / (1 + (len(own) - 1) * EQUAL_NOISE), _estimate_df(tested, ratio=ratio))
    return [
        replace(d, error=max(d.sd or 0.0, pooled) / math.sqrt(d.n), df=df) if d in tested and df > d.n - 1 else d
        for d in differences
    ]


def _estimate_df(differences: Sequence[Difference], *, ratio: bool) -> float:
    """Return Satterthwaite's degrees of freedom of the pooled variance, (tr S)^2 / tr S^2 of its covariance, both
    unbiased. A noisy baseline correlates all differences, so that ten groups say no more about the spread than one."""
    import numpy as np

    seeds = sorted(set.intersection(*({seed for seed, _ in d.pairs} for d in differences)))
    m, k = len(seeds) - 1, len(differences)
    if m < 2:
        return 0.0
    values = np.array([[dict(d.pairs)[seed] for seed in seeds] for d in differences])
    covariance: np.ndarray = np.cov(np.log(values) if ratio else values)
    trace, square = float(np.trace(covariance)), float((covariance**2).sum())
    of_square = square - trace**2 / m
    of_trace = (m + 1) / m * (trace**2 - 2 * square / (m + 1))
    if of_square <= 0.0:
        return math.inf
    return m * min(max(of_trace / of_square, 1.0), float(k))


def standard_error(difference: Difference) -> tuple[float, float] | None:
    """Return the standard error behind a statement and its degrees of freedom; None if nothing is tested."""
    if difference.p is None or not difference.sd:
        return None
    if difference.error is None or difference.df is None:
        error, df = difference.sd / math.sqrt(difference.n), difference.n - 1.0
    else:
        error, df = difference.error, difference.df
    return math.hypot(error, difference.choice_error), df


def _test(difference: Difference | None, ratio: bool) -> float | None:
    if difference is None or (found := standard_error(difference)) is None:
        return None
    mean = math.log(difference.mean) if ratio else difference.mean
    return two_sided_p(mean / found[0], found[1])


def _widen(difference: Difference, p_holm: float | None, count: int, *, ratio: bool) -> Difference:
    """Widen to Bonferroni's interval. Holm rejects more, so a rejected difference's interval ends at zero."""
    found = standard_error(difference)
    if p_holm is None or found is None:
        return replace(difference, family_low=difference.low, family_high=difference.high)
    mean = math.log(difference.mean) if ratio else difference.mean
    half = quantile_t(1 - LEVEL / (2 * count), found[1]) * found[0]
    low, high = mean - half, mean + half
    if p_holm < LEVEL:
        low, high = (max(0.0, low), high) if mean > 0.0 else (low, min(0.0, high))
    ends = (math.exp(low), math.exp(high)) if ratio else (low, high)
    return replace(difference, p_holm=p_holm, family_low=ends[0], family_high=ends[1])
