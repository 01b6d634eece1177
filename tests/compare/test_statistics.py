"""Statistics against scipy, and against the truth of simulated studies."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.compare.margin import decide_all, parse_margin, seeds_needed
from sparsebp_cli.compare.statistics import (
    Difference,
    Quartiles,
    add_choice,
    holm,
    paired_difference,
    paired_ratio,
    quartiles,
    spread,
    summarise,
)
from sparsebp_cli.errors import UsageError
from tests.compare.t_test import t_interval

NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 6))
STUDIES = 40_000  # the standard error of a coverage of 95% is then 0.1 points


def simulate(num_seeds: int, effects: tuple[float, ...], noise: float = 0.2) -> np.ndarray:
    """Differences of shape (studies, policies, seeds). Policies share a baseline, so their differences correlate."""
    draw = np.random.default_rng(num_seeds)
    # Seeds differ far more than groups do: that is why pairs are compared.
    seed = draw.normal(3.0, 5.0, (STUDIES, 1, num_seeds))
    baseline = seed + draw.normal(0.0, noise, seed.shape)
    group = seed + draw.normal(0.0, noise, (STUDIES, len(effects), num_seeds)) + np.array(effects)[:, None]
    return group - baseline


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
    assert found.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_the_interval_covers_the_truth_in_95_of_100_studies(num_seeds: int) -> None:
    low, high, _ = t_interval(simulate(num_seeds, (0.3,))[:, 0])
    assert 0.94 < float(np.mean((low <= 0.3) & (high >= 0.3))) < 0.96


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
def test_the_interval_of_a_ratio_covers_the_true_ratio_in_95_of_100_studies(num_seeds: int) -> None:
    truth = 0.8
    logs = simulate(num_seeds, (math.log(truth),))[:, 0]
    low, high, _ = np.exp(t_interval(logs))
    assert 0.94 < float(np.mean((low <= truth) & (high >= truth))) < 0.96
    one = paired_ratio({s: math.exp(x) for s, x in enumerate(logs[0])}, dict.fromkeys(range(num_seeds), 1.0))
    assert one is not None
    assert (one.low, one.high) == (pytest.approx(low[0]), pytest.approx(high[0]))


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_false_alarms_over_several_policies_stay_within_holms_bound(num_seeds: int) -> None:
    _, _, p = t_interval(simulate(num_seeds, (0.0, 0.0, 0.0, 0.0)))
    alone = float(np.mean((p < 0.05).any(axis=1)))
    corrected = float(np.mean([min(filter(None, holm(list(row)))) < 0.05 for row in p[:10_000]]))
    assert alone > 0.08  # what the correction is there for
    assert corrected < 0.05 + 0.005


def test_holm_finds_what_is_there_and_alarms_falsely_in_5_of_100_studies() -> None:
    _, _, p = t_interval(simulate(5, (0.0, 1.5, 0.0)))
    found = np.array([holm(list(row)) for row in p[:10_000]], dtype=float) < 0.05
    assert found[:, 1].mean() > 0.95
    assert found[:, [0, 2]].any(axis=1).mean() < 0.05 + 0.005


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5))
def test_holm_equals_the_closed_test_of_every_intersection(p_values: list[float]) -> None:
    places = range(len(p_values))
    subsets = [s for size in places for s in itertools.combinations(places, size + 1)]
    closed = [max(min(1.0, len(s) * min(p_values[i] for i in s)) for s in subsets if i in s) for i in places]
    assert holm(list(p_values)) == pytest.approx(closed)


def test_holm_counts_the_tests_that_were_made_alone() -> None:
    assert holm([0.01, None, 0.04]) == [0.02, None, 0.04]
    assert holm([0.03, 0.02]) == [0.04, 0.04]  # never falling
    assert holm([]) == []


def test_under_three_shared_seeds_there_is_a_difference_and_no_interval() -> None:
    found = paired_difference({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0, 2: 9.0})
    assert found == Difference(2.0, n=2, sd=math.sqrt(2.0), dropped=(2,), pairs=((0, 1.0), (1, 3.0)))
    assert paired_difference({0: 2.0, 5: 9.0}, {0: 1.0}) == Difference(1.0, n=1, dropped=(5,), pairs=((0, 1.0),))


def test_without_a_shared_seed_the_means_are_subtracted_and_no_pair_is_claimed() -> None:
    assert paired_difference({0: 2.0}, {1: 1.0, 2: 3.0}) == Difference(0.0, n=0, dropped=(0, 1, 2))
    assert paired_difference({}, {1: 1.0}) is None
    assert paired_difference({1: 1.0}, {}) is None


def test_equal_differences_give_an_interval_without_width_and_no_test() -> None:
    found = paired_difference({0: 1.5, 1: 2.5, 2: 3.5}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert found == Difference(0.5, 0.5, 0.5, 3, 0.0, pairs=((0, 0.5), (1, 0.5), (2, 0.5)))
    rounded = summarise([0.1, 0.1 + 1e-16, 0.1 - 1e-16])
    assert (rounded.p, rounded.sd) == (None, 0.0)


def test_half_and_double_lie_equally_far_from_as_much() -> None:
    found = paired_ratio({0: 0.5, 1: 2.0}, {0: 1.0, 1: 1.0})
    assert found is not None
    assert (found.mean, found.low) == (pytest.approx(1.0), None)
    assert paired_ratio({0: 0.0}, {0: 1.0}) is None
    swapped = (paired_ratio({0: 1.0, 1: 1.2, 2: 1.1}, {0: 2.0, 1: 2.1, 2: 2.6}), (1 / 2.0, 1.2 / 2.1, 1.1 / 2.6))
    back = paired_ratio({0: 2.0, 1: 2.1, 2: 2.6}, {0: 1.0, 1: 1.2, 2: 1.1})
    assert swapped[0] is not None
    assert back is not None
    assert back.low is not None
    assert swapped[0].high == pytest.approx(1 / back.low)
    assert swapped[0].mean == pytest.approx(scipy.stats.gmean(swapped[1]))


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


# Not worse by more than a margin


def answers(differences: list[list[float]], margin: float) -> list[str]:
    found = decide_all([summarise(row) for row in differences], margin, worse_is_up=True)
    return [decision.answer for decision in found if decision]


def test_the_margin_is_decided_as_scipys_test_against_the_margin_decides() -> None:
    for values in ([0.001, 0.002, 0.0], [0.05, 0.06, 0.055], [0.0, 0.02, 0.009]):
        expected = scipy.stats.ttest_1samp(values, 0.01).pvalue
        decision = decide_all([summarise(values)], 0.01, worse_is_up=True)[0]
        assert decision is not None
        assert decision.p == pytest.approx(expected)
        assert (decision.answer == "inconclusive") == (expected >= 0.05)
    assert answers([[0.001, 0.002, 0.0]], 0.01) == ["yes"]
    assert answers([[0.05, 0.06, 0.055]], 0.01) == ["no"]
    assert answers([[0.0, 0.02, 0.009]], 0.01) == ["inconclusive"]


def test_a_metric_that_is_better_when_higher_is_worse_when_it_falls() -> None:
    fell = summarise([-0.05, -0.06, -0.055])
    assert [d.answer for d in decide_all([fell], 0.01, worse_is_up=False) if d] == ["no"]
    assert [d.answer for d in decide_all([fell], 0.01, worse_is_up=True) if d] == ["yes"]


@pytest.mark.slow
def test_the_margin_answers_wrongly_in_5_of_100_studies_at_most_over_all_policies() -> None:
    margin = 0.1
    studies = simulate(4, (margin + 1e-9, margin + 1e-9, margin + 1e-9), noise=0.02)[:1000]
    wrong = sum("yes" in answers([list(row) for row in study], margin) for study in studies)
    assert wrong / 1000 < 0.05 / 2 + 0.015  # two-sided, so half of it on this side


def test_identical_runs_are_not_worse_and_a_constant_difference_decides_nothing() -> None:
    assert answers([[0.0, 0.0, 0.0]], 0.01) == ["yes"]
    assert answers([[0.5, 0.5, 0.5]], 0.01) == ["inconclusive"]
    two = decide_all([summarise([0.5, 0.6])], 0.01, worse_is_up=True)[0]
    assert two is not None
    assert (two.answer, two.p, two.more_seeds) == ("inconclusive", None, None)
    assert decide_all([None], 0.01, worse_is_up=True) == [None]


@pytest.mark.parametrize("effect", [0.5, 0.8, 2.0])
def test_so_many_seeds_decide_in_80_of_100_studies(effect: float) -> None:
    needed = seeds_needed(effect, 3)
    assert needed is not None
    draw = np.random.default_rng(1)

    def power(n: int) -> float:
        return float(np.mean(t_interval(draw.normal(effect, 1.0, (20_000, n)))[2] < 0.05))

    assert power(needed) > 0.79
    assert needed == 4 or power(needed - 1) < 0.81


def test_what_more_than_200_seeds_would_decide_is_not_foretold() -> None:
    assert seeds_needed(0.0, 3) is None
    assert seeds_needed(0.01, 3) is None
    assert seeds_needed(5.0, 3) == 4
    assert seeds_needed(5.0, 300) is None


def test_a_margin_is_read_with_and_without_its_metric() -> None:
    assert parse_margin("eval/loss=0.01") == ("eval/loss", 0.01)
    assert parse_margin("0.5") == (None, 0.5)
    for wrong in ("", "=1", "eval/loss=", "eval/loss=x", "0", "-1", "inf", "nan"):
        with pytest.raises(UsageError, match=r"^--margin must be a number above 0 or METRIC=NUMBER"):
            parse_margin(wrong)


def test_no_look_at_further_seeds_settles_what_the_tuning_left_open() -> None:
    plain = paired_difference(
        {seed: 3.0 + seed / 10 + seed % 3 / 1000 for seed in range(8)}, {seed: 2.98 + seed / 10 for seed in range(8)}
    )
    sure, unsure = decide_all([plain, add_choice(plain, 0.2)], 0.1, worse_is_up=True)
    assert sure is not None
    assert unsure is not None
    assert (sure.answer, sure.anytime) == ("yes", "yes")
    assert (unsure.answer, unsure.anytime, unsure.more_seeds) == ("inconclusive", "inconclusive", None)
