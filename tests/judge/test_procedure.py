"""Levels, the screen and the moves, each beside an oracle that is not ours."""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import sys
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from sparsebp_cli.errors import UsageError
from sparsebp_lab.judge.budget import QuestionBudget
from sparsebp_lab.judge.level import LEVEL, find_free, find_level, find_needed
from sparsebp_lab.judge.move import (
    MOST_PAIRS,
    Aim,
    Decide,
    MoveBar,
    Stake,
    Train,
    find_pair_move,
    find_screen_move,
)
from sparsebp_lab.judge.screen import MOST_RUNS, ScreenSquares, find_design
from tests.docs.block import ROOT


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that simulates nights; it makes its folder's other files importable itself when it runs alone."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script prepends the checkout
    return importlib.import_module("judge")


AIM = Aim(effect=1.0, pair_spread=1.0)


def test_the_levels_of_all_places_sum_to_five_percent() -> None:
    exact = [Fraction(5, (place + 4) * (place + 5)) for place in range(1, 2001)]
    assert [find_level(place) for place in range(1, 2001)] == pytest.approx([LEVEL * float(x) for x in exact])
    for count in (1, 10, 2000):
        assert sum(exact[:count]) == Fraction(count, count + 5)
    assert math.exp(find_needed(1)) == pytest.approx(1 / find_level(1)) == pytest.approx(120)


def test_the_first_free_place_is_taken() -> None:
    assert [find_free(taken) for taken in (set(), {1, 2}, {2}, {1, 3})] == [1, 3, 1, 2]


def test_the_screen_is_walds_test_of_every_sequence() -> None:
    """Each of the 3^8 sequences of pairs ends where the product of scipy's likelihood ratios says."""
    for gains in itertools.product((-0.6, 0.5, 1.7), repeat=MOST_RUNS):
        ratio, expected = 1.0, ""
        for number, gain in enumerate(gains, 1):
            ratio *= LIKELY[gain]
            expected = (
                "drop" if ratio <= 0.2 else "pass" if ratio >= 10 else "pass" if number == 8 and ratio > 1 else ""
            )
            expected = expected or ("drop" if number == 8 else "")
            move = find_screen_move(gains[:number], AIM)
            if expected:
                assert isinstance(move, Stake if expected == "pass" else Decide)
                break
            assert move == Train("screen", number + 1)


LIKELY = {gain: float(stats.norm.pdf(gain, 1, 1) / stats.norm.pdf(gain, 0, 1)) for gain in (-0.6, 0.5, 1.7)}


def test_the_spread_of_pairs_is_learned_around_the_mean_of_each_question() -> None:
    groups = [[1.0, 2.0, 4.0], [10.0, 11.0], [5.0]]
    found = ScreenSquares()
    for group in groups:
        found = found.add(group)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups[:2])
    assert found.find_spread(0.5) == pytest.approx(math.sqrt((3 * 2 * 0.25 + squares) / (3 + 3)))
    assert ScreenSquares().find_spread(0.5) == pytest.approx(0.5 * math.sqrt(2))
    assert [find_design(*pair) for pair in ((1.0, 0.0), (1.0, 10.0), (1.0, 0.8))] == [2.5, 0.5, 1.25]


def decide(shift: float, aim: Aim = AIM, seed: int = 5) -> tuple[Decide, int]:
    """Return the answer to pairs that gain so much, and after how many."""
    gains, bar = np.random.default_rng(seed).normal(shift, 1.0, MOST_PAIRS).tolist(), MoveBar(1.0, find_needed(3), 8.0)
    for count in range(MOST_PAIRS + 1):
        move = find_pair_move(gains[:count], aim, bar)
        if isinstance(move, Decide):
            return move, count
        assert move == Train("pairs", count + 1)
    raise AssertionError("no answer")


def test_pairs_are_better_worse_or_not_shown() -> None:
    assert [decide(shift)[0].outcome for shift in (1.2, 0.0, -6.0)] == ["better", "not shown", "worse"]
    assert "times less likely than no gain" in decide(0.0)[0].reason


def test_with_a_margin_it_goes_on_until_equality_is_shown() -> None:
    aim = Aim(1.0, 1.0, margin=1.5)
    assert isinstance(find_screen_move([], aim), Stake)
    assert decide(0.0, aim, 3)[0].outcome == "equal within the margin"


def test_equality_is_rarely_shown_of_what_lies_on_the_margin() -> None:
    found = [decide(1.0, Aim(1.0, 1.0, margin=1.0), seed)[0].outcome for seed in range(60)]
    assert found.count("equal within the margin") <= 8  # 3 of 60 are expected, at most


def test_the_simulation_screens_as_the_judge_does(simulation: ModuleType) -> None:
    draw, world = np.random.default_rng(0), simulation.World("", common=0.5)
    nights = simulation.Nights(world, simulation.JUDGE, 200, draw)
    effect, spread, runs = np.full(200, 0.9), np.full(200, 1.2), np.zeros(200)
    _, loss = nights.propose()
    passed = nights.screen(loss, effect, spread, runs)
    for base, own, went_on, num_runs in zip(nights.base, loss, passed, runs, strict=True):
        gains: list[float] = []
        while isinstance(move := find_screen_move(gains, Aim(0.9, 1.2)), Train):
            gains.append(base[move.number - 1] - own[move.number - 1])
        assert (isinstance(move, Stake), len(gains)) == (went_on, num_runs)


def test_walds_bound_is_that_of_a_test_with_known_normal_noise(simulation: ModuleType) -> None:
    bound = simulation.find_bound(0.0)
    level, miss, drift = (
        5e-4,
        0.2,
        stats.norm.expect(lambda x: stats.norm.logpdf(x, 1) - stats.norm.logpdf(x, 0), loc=1),
    )
    assert bound["real"] * drift == pytest.approx(
        (1 - miss) * math.log((1 - miss) / level) + miss * math.log(miss / (1 - level))
    )
    assert bound["null"] > 3.0  # so three runs a null are out of reach where seeds have nothing in common


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("30m", 1800, "seconds"),
        ("2h", 7200, "seconds"),
        ("3e15", 3e15, "flops"),
        ("90s", 90, "seconds"),
        ("5 FLOPs", 5, "flops"),
    ],
)
def test_a_budget_is_a_time_or_flops(text: str, amount: float, unit: str) -> None:
    assert QuestionBudget.parse(text) == QuestionBudget(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "m", "-3", "0", "1e999", "30 minutes", "nan", "1.2.3h"])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget must be a time"):
        QuestionBudget.parse(text)
