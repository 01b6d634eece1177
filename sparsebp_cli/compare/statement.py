"""Define statements of a comparison as data. Tables, the report, JSON and ``--fail-if`` read only these objects.
:mod:`~sparsebp_cli.compare.words` turns them into sentences last.

Withheld numbers, such as a step time of a busy machine, are in no statement and in no other field of the comparison,
only their reason is. So no output can print them.
"""

from __future__ import annotations

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
    "common step",  # for trainings of unequal length or batch: the metric at the last step that both evaluated
    "examples",  # two trained models on the same held-out examples
    "margin",  # whether it is not worse by more than the margin
    "cost",  # FLOPs of all steps
    "step time",  # whole steps of two runs
    "memory",  # memory that a step holds
    "random",  # against the random control
    "equal cost",  # against the best dense of equal cost
    "circumstance",  # other facts that readers need
]

# The outcomes of quality, from the most urgent to the least informative; other subjects use some of them.
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
    """A number behind a statement.

    Args:
        name: Name of the metric or measurement; for a control, its label.
        value: A difference, a ratio, or a plain number.
        low: Lower end of its interval; None without one.
        high: Upper end of the interval; None without one.
        count: Number of seeds or examples behind it; 0 for a plain number.
        p: The decisive p value, corrected; None without a test.
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
        """Return the shown part of a difference or a ratio."""
        low, high = difference.shown
        simultaneous = difference.family_low is not None
        return cls(name, difference.mean, low, high, difference.n, difference.decisive_p, simultaneous)


@dataclass(frozen=True)
class Statement:
    """One statement of a comparison, never stronger than its numbers support.

    Args:
        outcome: Finding in one or a few fixed words. *Better* and *worse* apply to equal trainings; *lower* and
            *higher* to times, memory, and trainings of unequal length or batch; *fault* is a policy that declares
            itself exact and is not.
        subject: Aspect that was compared, such as ``quality``.
        numbers: Numbers behind it, the main one first; empty if nothing may be shown.
        reasons: Words that limit or explain it, for people only.
    """

    outcome: Outcome
    subject: Subject
    numbers: tuple[Number, ...] = ()
    reasons: tuple[str, ...] = ()

    def number(self, name: str) -> Number | None:
        """Return the number with that name; None if there is none."""
        return next((number for number in self.numbers if number.name == name), None)

    def is_gain(self, good: str) -> bool:
        """Return whether it shows a gain, bold in tables. ``good`` is the better direction of its numbers, ``lower`` or
        ``higher``; empty if unknown."""
        return bool(good) and self.outcome in {"better", good}


def is_shown(number: Number, zero: float = 0.0) -> bool:
    """Return whether a number differs from ``zero`` after correction: 0 for a difference, 1 for a ratio."""
    if number.value == zero or number.low == number.high == zero:
        return False
    return number.p is not None and number.p < LEVEL
