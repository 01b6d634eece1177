"""Compute the statistics of a comparison with scipy's formulas, and decide when none applies.

Differences are paired by seed and their 95% intervals are Student's t; a percentile bootstrap covers the truth in 74%
of cases at three seeds. Ratios use the logarithm, where "half" and "double" are equally far from "as much". Several
policies against one baseline are several chances to find something: S. Holm, A Simple Sequentially Rejective Multiple
Test Procedure (1979), keeps the chance of any false find at 5%.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

FEWEST_PAIRS = 3  # a t interval of two pairs is 12.7 standard errors wide on each side
LEVEL = 0.95
SAME = 1e-12  # differences that vary by less than this fraction of their size differ only by rounding


@dataclass(frozen=True)
class Spread:
    """Mean over seeds.

    Args:
        mean: Arithmetic mean over the seeds.
        sd: Sample standard deviation; None below two values.
        n: Number of values.
    """

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of many measured times.

    Args:
        median: Value below which half of them are.
        low: Lower quartile: a quarter of them are below.
        high: Upper quartile: a quarter of them are above.
        n: Number of measured values.
    """

    median: float
    low: float
    high: float
    n: int

    def shift(self, by: float) -> Quartiles:
        """Return the quartiles of the values with a number added to each."""
        return Quartiles(self.median + by, self.low + by, self.high + by, self.n)


@dataclass(frozen=True)
class Difference:
    """A group against another, paired by seed: as a difference, or as a ratio (whose mean is geometric).

    Args:
        mean: Mean over the shared seeds; without any, the difference or ratio of the two means.
        low: Lower end of the 95% interval; None below three shared seeds.
        high: Upper end of the 95% interval; None below three shared seeds.
        n: Number of shared seeds, or of other pairs.
        sd: Standard deviation of the single differences (of the logarithms, for a ratio); None below two.
        p: p of the two-sided t test for no difference; None without an interval, or if all pairs differ equally.
        p_holm: The p behind a statement: from ``error`` and ``df``, after Holm's correction over the whole family of
            statements; None if there is nothing to correct.
        dropped: Seeds that only one side has, so that they are in no pair.
        pairs: Seed and difference of each pair (or ratio), in the order of seeds.
        error: Standard error behind p_holm (of the logarithm, for a ratio); None for sd / sqrt(n).
        df: Degrees of freedom of that error; None for n - 1.
        family_low: Lower end of the simultaneous 95% interval: all of the family hold at once with that chance.
        family_high: Upper end of the simultaneous 95% interval; None without one.
        choice_error: Standard error due to tuning choices for both sides, included in all other numbers here; 0 without
            tuning.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    n: int = 0
    sd: float | None = None
    p: float | None = None
    p_holm: float | None = None
    dropped: tuple[int, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    error: float | None = None
    df: float | None = None
    family_low: float | None = None
    family_high: float | None = None
    choice_error: float = 0.0

    @property
    def shown(self) -> tuple[float | None, float | None]:
        """The interval to show: the simultaneous one if there is one."""
        return (self.low, self.high) if self.family_low is None else (self.family_low, self.family_high)

    @property
    def decisive_p(self) -> float | None:
        """The p value behind a statement."""
        return self.p if self.p_holm is None else self.p_holm


def add_choice(difference: Difference, error: float) -> Difference:
    """Return a difference whose interval and p include the error of a tuning choice, which seeds do not show."""
    if not error or difference.p is None or difference.sd is None:
        return difference
    whole, df = math.hypot(difference.sd / math.sqrt(difference.n), error), difference.n - 1
    half = quantile_t(0.5 + LEVEL / 2, df) * whole
    low, high, p = difference.mean - half, difference.mean + half, two_sided_p(difference.mean / whole, df)
    return replace(difference, low=low, high=high, p=p, choice_error=error)


def withhold_statement(difference: Difference) -> Difference:
    """Return a difference without a statement."""
    return replace(difference, low=None, high=None, p=None)


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and standard deviation; None without values. Infinite values have no standard deviation."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Spread(sum(values) / len(values), None, len(values))
    return Spread(math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """Return median and quartiles, linear between values; None without values."""
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high, len(values))


def paired_difference(group: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return the difference of two groups, paired by seed, with an interval from three shared seeds up. Both map seed
    to value; None if one of them is empty."""
    if not group or not baseline:
        return None
    shared, dropped = sorted(group.keys() & baseline.keys()), tuple(sorted(group.keys() ^ baseline.keys()))
    if not shared:
        return Difference(statistics.fmean(group.values()) - statistics.fmean(baseline.values()), dropped=dropped)
    pairs = tuple((seed, group[seed] - baseline[seed]) for seed in shared)
    return replace(summarise([difference for _, difference in pairs], dropped), pairs=pairs)


def paired_ratio(group: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Return the ratio of two groups, paired by seed, on the logarithm; None without values or if one is <= 0."""
    if any(value <= 0.0 for values in (group, baseline) for value in values.values()):
        return None
    here, there = ({seed: math.log(value) for seed, value in values.items()} for values in (group, baseline))
    found = paired_difference(here, there)
    if found is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    pairs = tuple((seed, math.exp(difference)) for seed, difference in found.pairs)
    return replace(found, mean=math.exp(found.mean), low=low, high=high, pairs=pairs)


def summarise(differences: Sequence[float], dropped: tuple[int, ...] = ()) -> Difference:
    """Return the mean of at least one difference, with an interval if there are three and they are not all equal. Equal
    differences have an interval without width and no p value. ``dropped`` is copied into the result."""
    n, mean = len(differences), math.fsum(differences) / len(differences)
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in differences) / (n - 1)) if n > 1 else None
    if sd is None or n < FEWEST_PAIRS:
        return Difference(mean, n=n, sd=sd, dropped=dropped)
    if sd <= SAME * max(map(abs, differences)):
        return Difference(mean, mean, mean, n, 0.0, dropped=dropped)
    error = sd / math.sqrt(n)
    half = quantile_t(0.5 + LEVEL / 2, n - 1) * error
    return Difference(mean, mean - half, mean + half, n, sd, two_sided_p(mean / error, n - 1), dropped=dropped)


def quantile_t(share: float, df: float) -> float:
    """Return the quantile of Student's t, like ``scipy.stats.t.ppf`` but a hundred times faster."""
    from scipy import special

    return float(special.stdtrit(df, share))


def two_sided_p(statistic: float, df: float) -> float:
    """Return the chance that a Student's t is at least this far from 0."""
    from scipy import special

    return float(2 * special.stdtr(df, -abs(statistic)))


def summarise_clusters(differences: Sequence[float], clusters: Sequence[int]) -> Difference:
    """Return the mean of differences that are correlated within clusters, such as documents; without an interval below
    three. The standard error sums over clusters (K.-Y. Liang and S. Zeger, 1986), with Student's t for one degree of
    freedom less than there are clusters. If each difference is its own cluster, the interval equals that of
    :func:`summarise`. ``clusters`` are any numbers that identify them."""
    import numpy as np

    values = np.asarray(differences)
    _, places = np.unique(np.asarray(clusters), return_inverse=True)
    count, plain = int(places.max()) + 1, summarise(differences)
    if count < FEWEST_PAIRS:
        return replace(plain, low=None, high=None, p=None)
    if plain.p is None:
        return plain
    sums = np.bincount(places, values - plain.mean)
    error = math.sqrt(count / (count - 1) * float(sums @ sums)) / len(values)
    half = quantile_t(0.5 + LEVEL / 2, count - 1) * error
    p = two_sided_p(plain.mean / error, count - 1) if error else 0.0
    return replace(plain, low=plain.mean - half, high=plain.mean + half, p=p, error=error, df=count - 1.0)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for their number: the smallest times m, the next times m - 1, never decreasing. None is
    a test that could not be made; it does not count. Compared with 5%, the results keep the chance of any false find
    below it."""
    made = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    found: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for done, (p, place) in enumerate(made):
        largest = max(largest, min(1.0, (len(made) - done) * p))
        found[place] = largest
    return found
