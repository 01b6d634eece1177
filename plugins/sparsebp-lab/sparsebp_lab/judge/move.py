"""Decide what a question needs next, from its looks only, so that a repetition gives the same answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsebp_lab.judge.bet import forecast, log_capital
from sparsebp_lab.judge.screen import find_passage, log_odds

Outcome = Literal["better", "worse", "equal within the margin", "not shown"]
Stage = Literal["pool", "screen", "pairs", "gain", "test"]

MOST_PAIRS = 200  # deciding pairs; chosen by benchmarks/judge.py
FUTILE = math.log(0.1)  # odds of the gain against none at which the search stops
SOON = 8  # further pairs to make of a hopeless candidate if they would show that it is worse
AGAINST = math.log(20.0)  # evidence that a candidate is worse, or within the margin: 5% for each question
WORST = 20.0  # default worst case, in standard deviations of a run


@dataclass(frozen=True)
class Train:
    """Train runs for the next look: the baseline only (the pool), or a pair."""

    stage: Stage
    number: int  # from 1


@dataclass(frozen=True)
class FixAim:
    """The pool is complete: fix the effect before the first look."""


@dataclass(frozen=True)
class Stake:
    """The candidate has passed the screen: take a level."""


@dataclass(frozen=True)
class Decide:
    """Close the question."""

    outcome: Outcome
    reason: str


Move = Train | FixAim | Stake | Decide


@dataclass(frozen=True)
class Aim:
    """Values that are fixed before the first look."""

    effect: float  # the gain to find, in the metric's unit
    pair_spread: float  # standard deviation of a pair in the screen, as known then
    margin: float | None = None  # within it both count as equal; None: not asked
    run_spread: float = 0.0  # standard deviation of the baseline's runs, as known then


@dataclass(frozen=True)
class MoveBar:
    """Values that are fixed before the first deciding pair."""

    design: float  # the effect in standard deviations of a pair
    needed: float  # logarithm of the evidence that the candidate needs
    worst: float  # in the metric's unit: a larger loss of a seed is a ruin; a mean counts no more of it


def log_evidence(gains: Sequence[float], aim: Aim, bar: MoveBar, offset: float = 0.0) -> float:
    """Return the logarithm of the evidence that the mean of the clipped gains is above ``-offset``."""
    return log_capital([gain + offset for gain in gains], bar.worst + offset, aim.effect, aim.effect / bar.design)


def find_screen_move(gains: Sequence[float], aim: Aim) -> Move:
    """Return the next move in the screen. With a margin it drops nobody: the answer may be that both are equal."""
    if aim.margin is not None:
        return Stake()
    if not gains:
        return Train("screen", 1)
    count = len(gains)
    match find_passage(log_odds(math.fsum(gains), count, aim.effect, aim.pair_spread), count):
        case "open":
            return Train("screen", count + 1)
        case "pass":
            return Stake()
    mean = math.fsum(gains) / count
    return Decide("not shown", f"dropped in the screening: the mean gain of {count} runs is {mean:.4g}")


def find_pair_move(gains: Sequence[float], aim: Aim, bar: MoveBar) -> Move:
    """Return the next move among the deciding pairs."""
    count, losses = len(gains), [-gain for gain in gains]
    found, against = log_evidence(gains, aim, bar), log_evidence(losses, aim, bar)
    if found >= bar.needed:
        return Decide("better", f"evidence {math.exp(found):.4g}, needed {math.exp(bar.needed):.4g}")
    if against >= AGAINST:
        return Decide(
            "worse", f"evidence {math.exp(against):.4g} that the candidate is worse, needed {math.exp(AGAINST):.4g}"
        )
    if aim.margin is not None:
        if all(log_evidence(some, aim, bar, aim.margin) >= AGAINST for some in (gains, losses)):
            return Decide("equal within the margin", f"not better and not worse by more than {aim.margin:g}")
    elif (
        odds := log_odds(math.fsum(gains), count, aim.effect, aim.effect / bar.design)
    ) <= FUTILE and not _is_worse_soon(losses, aim, bar):
        return Decide(
            "not shown", f"a gain of {aim.effect:.4g} is {math.exp(-odds):.3g} times less likely than no gain"
        )
    if count >= MOST_PAIRS:
        return Decide("not shown", f"undecided after {MOST_PAIRS} pairs of runs, the most that judge trains")
    return Train("pairs", count + 1)


def _is_worse_soon(losses: Sequence[float], aim: Aim, bar: MoveBar) -> bool:
    """Return whether a few further pairs like these would show that a candidate is worse."""
    if len(losses) == 1:  # one pair predicts nothing
        return losses[0] >= aim.effect
    more = forecast(losses, bar.worst, aim.effect, aim.effect / bar.design, AGAINST)
    return more is not None and more <= SOON
