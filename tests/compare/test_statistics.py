"""Statistics against scipy, and against the truth."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.compare.statistics import Difference, Quartiles, paired_difference, quartiles, spread, student_t

NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 6))


@given(st.dictionaries(st.integers(0, 99), st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=12))
def test_the_interval_is_that_of_scipys_paired_t_test(pairs: dict[int, tuple[float, float]]) -> None:
    group, baseline = ({seed: pair[side] for seed, pair in pairs.items()} for side in (0, 1))
    found = paired_difference(group, baseline)
    differences = [group[seed] - baseline[seed] for seed in sorted(pairs)]
    if statistics.pstdev(differences) <= 1e-9 * max(map(abs, differences)):
        return  # scipy divides by zero there; the case of equal differences is tested below
    expected = scipy.stats.ttest_rel([group[s] for s in sorted(pairs)], [baseline[s] for s in sorted(pairs)])
    low, high = expected.confidence_interval(0.95)
    assert found is not None
    assert found.mean == pytest.approx(statistics.fmean(differences), rel=1e-9, abs=1e-9)
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-6, abs=1e-6), pytest.approx(high, rel=1e-6, abs=1e-6))


def test_the_factor_is_the_quantile_of_student() -> None:
    for degrees in (1, 2, 4, 30, 1000):
        assert student_t(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=1e-10)
        assert student_t(degrees, 0.9) == pytest.approx(scipy.stats.t.ppf(0.95, degrees), rel=1e-10)


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_the_interval_covers_the_truth_in_95_of_100_cases(num_seeds: int) -> None:
    draw, truth, trials = random.Random(7), 0.3, 4000
    covered = 0
    for _ in range(trials):
        # Seeds differ far more than groups do: that is why pairs are compared.
        base = {seed: draw.gauss(3.0, 5.0) for seed in range(num_seeds)}
        found = paired_difference({seed: value + draw.gauss(truth, 0.2) for seed, value in base.items()}, base)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert 0.94 < covered / trials < 0.96


def test_under_three_shared_seeds_there_is_a_difference_and_no_interval() -> None:
    assert paired_difference({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0, 2: 9.0}) == Difference(2.0, None, None, 2)
    assert paired_difference({0: 2.0, 5: 9.0}, {0: 1.0}) == Difference(1.0, None, None, 1)


def test_without_a_shared_seed_the_means_are_subtracted_and_no_pair_is_claimed() -> None:
    assert paired_difference({0: 2.0}, {1: 1.0, 2: 3.0}) == Difference(0.0, None, None, 0)
    assert paired_difference({}, {1: 1.0}) is None
    assert paired_difference({1: 1.0}, {}) is None


def test_equal_differences_give_an_interval_without_width() -> None:
    assert paired_difference({0: 1.5, 1: 2.5, 2: 3.5}, {0: 1.0, 1: 2.0, 2: 3.0}) == Difference(0.5, 0.5, 0.5, 3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_quartiles_are_numpys(values: list[float]) -> None:
    low, median, high = np.percentile(values, [25, 50, 75])
    found = quartiles(values)
    assert found is not None
    assert found.n == len(values)
    assert (found.median, found.low, found.high) == tuple(
        pytest.approx(x, rel=1e-9, abs=1e-6) for x in (median, low, high)
    )


def test_one_value_has_no_standard_deviation_and_nothing_has_no_mean() -> None:
    found = spread([2.0])
    assert found is not None
    assert (found.mean, found.sd, found.n) == (2.0, None, 1)
    assert spread([]) is None
    assert quartiles([]) is None
    assert quartiles([3.0]) == Quartiles(3.0, 3.0, 3.0, 1)
    several = spread([1.0, 2.0, 4.0])
    assert several is not None
    assert several.sd == pytest.approx(np.std([1.0, 2.0, 4.0], ddof=1))
