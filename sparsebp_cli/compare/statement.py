"""What a comparison states of a group, as data: tables, pictures, the report, LaTeX, JSON, gate and leaderboard read
these objects and nothing else, and :mod:`~sparsebp_cli.compare.words` puts them into sentences last.

A number that may not be shown, such as a step time of a busy machine, is in no statement and in no other field of the
comparison: what stands in its place is the reason. So a face of a comparison cannot print it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.compare.statistics import Difference

LEVEL = 0.05

Outcome = Literal[
    "fault",
    "better",
    "lower",
    "not worse",
    "equal within the margin",
    "exact",
    "identical",
    "no difference shown",
    "differs",
    "worse",
    "higher",
    "inconclusive",
    "no statement",
]

Subject = Literal[
    "quality",  # the metric against the baseline's; a group's first statement
    "common step",  # of trainings of unequal length or batch: the metric at the last step that both evaluated
    "examples",  # two trained models on the same held-out examples
    "margin",  # whether it is not worse by more than the margin
    "cost",  # FLOPs of all steps
    "step time",  # whole steps of two runs
    "memory",  # what a step holds
    "random",  # against the control that draws at random
    "equal cost",  # against the best dense of equal cost
    "circumstance",  # what else has to be known
]

# The outcomes of quality, from what has to be read first to what says least; those of other subjects are among them.
OUTCOMES: tuple[Outcome, ...] = (
    "fault",
    "better",
    "lower",
    "equal within the margin",
    "exact",
    "identical",
    "no difference shown",
    "differs",
    "worse",
    "higher",
    "no statement",
)


@dataclass(frozen=True)
class Number:
    """A number that a statement rests on.

    Args:
        name: Name of the metric or figure; of a control, its label.
        value: A difference, a ratio, or a plain number.
        low: Lower end of its interval; None without.
        high: Upper end of the interval; None without.
        count: Seeds or examples behind it; 0 for a plain number.
        p: The p value that decides, corrected; None without a test.
        simultaneous: Whether the interval holds together with those of the whole family.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0
    p: float | None = None
    simultaneous: bool = False

    @classmethod
    def of(cls, name: str, difference: Difference) -> Number:
        """Take what may be shown of a difference or a ratio."""
        low, high = difference.shown
        simultaneous = difference.family_low is not None
        return cls(name, difference.mean, low, high, difference.n, difference.decisive_p, simultaneous)


@dataclass(frozen=True)
class Statement:
    """One thing that a comparison states, never more than its numbers allow.

    Args:
        outcome: Finding in one or a few fixed words. *Better* and *worse* are of equal trainings; *lower* and *higher*
            of times, memory, and trainings of unequal length or batch; *fault* is a policy that declares itself exact
            and is not.
        subject: Aspect that was compared, such as ``quality``.
        numbers: Numbers that it rests on, the main one first; empty where nothing may be shown.
        reasons: Words that limit or explain it. Nothing reads them but people.
    """

    outcome: Outcome
    subject: Subject
    numbers: tuple[Number, ...] = ()
    reasons: tuple[str, ...] = ()

    def number(self, name: str) -> Number | None:
        """Return the number of that name; None without."""
        return next((number for number in self.numbers if number.name == name), None)

    def is_gain(self, good: str) -> bool:
        """Whether it shows a gain: bold in tables. ``good`` is the better direction of its numbers, ``lower`` or
        ``higher``; empty where unknown."""
        return bool(good) and self.outcome in {"better", good}


def find_statement(statements: Iterable[Statement], subject: Subject) -> Statement | None:
    """Return the first statement on a subject; None where there is none."""
    return next((statement for statement in statements if statement.subject == subject), None)


def is_shown(number: Number, zero: float = 0.0) -> bool:
    """Whether a number differs from ``zero``, after correction: 0 for a difference, 1 for a ratio."""
    if number.value == zero or number.low == number.high == zero:
        return False
    return number.p is not None and number.p < LEVEL
