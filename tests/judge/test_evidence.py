"""The evidence is the likelihood ratio of t, as scipy has it, and a martingale without a gain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from sparsebp_cli.judge.evidence import forecast, log_evidence, measure


@pytest.mark.parametrize("count", [2, 3, 5, 8, 20, 60])
@pytest.mark.parametrize("effect", [0.5, 1.0, 2.5])
def test_evidence_is_scipys_ratio_of_noncentral_to_central_t(count: int, effect: float) -> None:
    draw = np.random.default_rng(count)
    for shift in (-1.0, 0.0, 0.7):
        gains = draw.normal(shift, 3.0, count)
        t = gains.mean() / gains.std(ddof=1) * math.sqrt(count)
        ratio = stats.nct.pdf(t, count - 1, effect * math.sqrt(count)) / stats.t.pdf(t, count - 1)
        if ratio > 1e-8:  # scipy's own tails end there
            assert measure(gains.tolist(), effect) == pytest.approx(math.log(ratio), abs=1e-6)


def test_one_pair_tells_its_sign() -> None:
    for effect in (0.5, 1.3):
        assert math.exp(measure([3.7], effect)) == pytest.approx(2 * stats.norm.cdf(effect))
        assert math.exp(measure([-0.1], effect)) == pytest.approx(2 * stats.norm.cdf(-effect))


@pytest.mark.parametrize("count", [2, 4, 9])
def test_without_a_gain_its_mean_is_one(count: int) -> None:
    def weigh(t: float) -> float:
        # Pairs with this t: two of them off the mean carry all of the spread.
        spread = math.sqrt((count - 1) / 2)
        gains = [t / math.sqrt(count) + x for x in (spread, -spread, *[0.0] * (count - 2))]
        return math.exp(measure(gains, 1.0)) * float(stats.t.pdf(t, count - 1))

    assert integrate.quad(weigh, -np.inf, np.inf)[0] == pytest.approx(1.0, abs=1e-6)


def test_it_ever_crosses_a_bar_no_more_often_than_the_bar_allows() -> None:
    draw, nights, level = np.random.default_rng(0), 4000, 0.05
    total, squares, crossed = np.zeros(nights), np.zeros(nights), np.zeros(nights, dtype=bool)
    for count in range(1, 61):
        gains = draw.normal(size=nights)
        total, squares = total + gains, squares + gains**2
        crossed |= log_evidence(count, total, squares, np.ones(nights)) >= -math.log(level)
    assert 0.02 < crossed.mean() < level + 3 * math.sqrt(level * (1 - level) / nights)


def test_worse_candidates_have_less_evidence_at_every_look() -> None:
    gains = np.random.default_rng(1).normal(0.5, 1.0, 30)
    for count in range(1, 31):
        found = [measure((gains[:count] - by).tolist(), 1.0) for by in (0.0, 0.3, 2.0)]
        assert found == sorted(found, reverse=True)


def test_a_spread_or_a_sign_that_tells_nothing_is_no_evidence() -> None:
    assert measure([], 1.0) == 0.0
    assert measure([0.0, 0.0], 1.0) == pytest.approx(-1.0)  # equal runs: a gain of a standard deviation is not there
    assert measure([1.0] * 10, 2.0) == pytest.approx(measure([7.0] * 10, 2.0))


def test_a_forecast_is_the_first_number_of_pairs_that_would_do() -> None:
    gains, needed = [0.2, 1.0, -0.1, 0.9], 5.0
    more = forecast(gains, 1.0, needed)
    assert more is not None
    mean, spread = float(np.mean(gains)), float(np.std(gains, ddof=1))

    def at(count: int) -> float:
        squares = np.array([count * mean**2 + (count - 1) * spread**2])
        return float(log_evidence(count, np.array([count * mean]), squares, np.ones(1))[0])

    assert at(len(gains) + more) >= needed > at(len(gains) + more - 1)
    assert forecast([-1.0, -2.0, -1.5], 1.0, needed) is None
    assert forecast([1.0], 1.0, needed) is None
