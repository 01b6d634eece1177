"""Bets keep what they promise whatever the shape of the pairs is, and a seed that is a ruin ends *better*."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sparsebp_lab.judge.bet import bound_share, forecast, log_capital
from sparsebp_lab.judge.ledger import Book
from sparsebp_lab.judge.move import Decide
from sparsebp_lab.judge.session import find_move

from .here import make_session, write_recipe
from .test_session import answer

WORST = 10.0
LOOKS = (5, 20, 60)


def test_capital_is_the_product_of_what_each_bet_returns() -> None:
    gains, capital = [1.0, -2.0, 30.0, 0.5], 1.0
    for number, gain in enumerate(gains):
        before = [min(max(one, -WORST), WORST) for one in gains[:number]]
        mean = (4 * 0.8 + sum(before)) / (4 + number)
        second = (4 * (0.8**2 + 1.1**2) + sum(one**2 for one in before)) / (4 + number)
        stake = min(max(mean / second, 0.0), 0.99 / WORST)
        capital *= 1 + stake * min(max(gain, -WORST), WORST)
    assert log_capital(gains, WORST, 0.8, 1.1) == pytest.approx(math.log(capital))
    assert log_capital([], WORST, 0.8, 1.1) == 0.0


@pytest.mark.parametrize(
    ("share", "depth"), [(0.5, 1.0), (0.2, 4.0), (0.05, 9.0), (0.1, WORST), (1 / 3, 40.0)], ids=str
)
def test_without_a_gain_in_the_clipped_mean_a_bet_rarely_wins_whatever_the_shape(share: float, depth: float) -> None:
    """A candidate is mostly a little better and loses much in a share of its seeds; its clipped mean is 0."""
    draw, level, won = np.random.default_rng(3), 0.05, 0
    small = share * min(depth, WORST) / (1 - share)
    for _ in range(300):
        gains = np.where(draw.random(60) < share, -depth, small)
        won += any(
            log_capital(gains[:count].tolist(), WORST, 1.0, 1.0) >= -math.log(level) for count in (5, 20, 40, 60)
        )
    assert won / 300 < level + 3 * math.sqrt(level * (1 - level) / 300)


def test_heavy_tails_and_a_law_that_changes_are_no_gain() -> None:
    draw, level, won = np.random.default_rng(4), 0.05, 0
    for _ in range(300):
        gains = draw.standard_t(1.5, 60) * np.where(np.arange(60) % 7 < 3, 0.1, 3.0)
        won += any(
            log_capital(gains[:count].tolist(), WORST, 1.0, 1.0) >= -math.log(level) for count in (5, 20, 40, 60)
        )
    assert won / 300 < level + 3 * math.sqrt(level * (1 - level) / 300)


def test_a_ruin_that_no_pair_showed_has_the_share_of_the_binomial_law() -> None:
    for count, level in ((20, 0.05), (93, 0.01)):
        assert stats.binom.cdf(0, count, bound_share(count, level)) == pytest.approx(level)
    assert bound_share(0, 0.05) == 1.0


def test_a_forecast_is_the_first_number_of_pairs_that_would_do() -> None:
    gains, needed = [0.2, 1.0, -0.1, 0.9], 3.0
    more = forecast(gains, WORST, 1.0, 1.0, needed)
    assert more is not None
    after = [log_capital([*gains, *[0.5] * count], WORST, 1.0, 1.0) for count in (more - 1, more)]
    assert after[0] < needed <= after[1]
    assert forecast([-1.0, -2.0], WORST, 1.0, 1.0, needed) is None
    assert forecast([1.0], WORST, 1.0, 1.0, needed) is None


def book_of(*gains: float, worst: float | None = 5.0) -> Book:
    """Return a ledger in which a candidate is staked and has these pairs; without a worst case it is one of 0.5."""
    found = Book()
    side = {"name": "one", "digest": "d"}
    staked = {"kind": "staked", "question": "q", "design": 1.0, "needed": 4.8, "place": 1}
    entries = [
        {"kind": "asked", "question": "q", "candidate": side, "baseline": side, "margin": None},
        {"kind": "aimed", "question": "q", "effect": 1.0, "pair_spread": 1.0, "margin": None},
        staked if worst is None else staked | {"worst": worst},
    ]
    for number, gain in enumerate(gains, 1):
        look = {"stage": "pairs", "number": number, "gain": gain, "runs": ["b", f"c{number}"], "values": [1.0, 2.0]}
        entries.append({"kind": "look", "question": "q"} | look)
    for entry in entries:
        found.add(entry)
    return found


def test_one_seed_beyond_the_worst_case_ends_better_and_is_named() -> None:
    question = book_of(*[3.0] * 40, -5.0).questions["q"]
    move = find_move(question, 0)
    assert isinstance(move, Decide)
    assert (move.outcome, move.reason) == ("not shown", "run c41 lost 5 against b, at least --worst 5")
    kept = find_move(book_of(*[3.0] * 40, -4.9).questions["q"], 0)
    assert isinstance(kept, Decide)
    assert kept.outcome == "better"


def test_a_question_that_was_staked_before_worst_cases_goes_on_with_the_default() -> None:
    bar = book_of(1.0, worst=None).questions["q"].bar
    assert bar is not None
    assert bar.worst == 20.0


def test_an_answer_names_its_claims_and_what_they_rest_on(tmp_path: Path) -> None:
    found = answer(make_session(write_recipe(tmp_path), "training.learning_rate=0.7"))
    claims = found.claims
    assert [*claims] == ["better in the mean", "better in most seeds", "no rare ruin"]
    assert (claims["better in the mean"]["shown"], claims["better in the mean"]["worst"]) == (True, 0.5)
    assert (claims["no rare ruin"]["shown"], claims["no rare ruin"]["ruined"]) == (True, [])
    lines = [line for line in found.lines() if "0.5" in line]
    assert any(line.startswith("better in the mean, if no seed loses more than 0.5: shown") for line in lines)
    assert any(line.startswith("no seed loses more than 0.5: none of ") for line in lines)
