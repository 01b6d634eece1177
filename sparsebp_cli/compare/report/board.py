"""The first screen of the report: one sentence, and the leaderboard with its intervals.

Both repeat what the comparison holds: the sentence sorts groups by the first statement of their verdicts, and the
cells are the differences of the tables, written in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.statistics import Difference
from sparsebp_cli.compare.verdict import OUTCOMES, find_outcome, split_statements

MOST_NAMES = 6
ROOM = 6.0  # of 100, at both ends of a bar
LEAST = 1e-4  # of the baseline's value: a scale of differences is no finer, so that rounding stays at its zero
TIMES = ("step time", "timed in turns")  # how statements about time begin; they are what an exact policy is for


@dataclass(frozen=True)
class Bar:
    """An interval on the scale of its column, from 0 to 100; ``low`` and ``high`` are ``mean`` without an interval."""

    zero: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One value of the leaderboard; ``value`` sorts, None comes last."""

    text: str
    value: float | None = None
    bar: Bar | None = None


@dataclass(frozen=True)
class BoardRow:
    """One group, by its place in the comparison, which gives colour and mark."""

    number: int
    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Board:
    """The leaderboard: columns after the group's, rows, and a note."""

    columns: tuple[str, ...]
    rows: tuple[BoardRow, ...]
    note: str


def make_headline(comparison: Comparison) -> str:
    """Return one sentence: what was found first of the only group, with its time if it is exact, or the groups by what
    was found of each."""
    base, *others = comparison.groups
    if not others:
        return f"{base.label} alone: there is nothing to compare it with."
    if len(others) == 1:
        first, *rest = split_statements(others[0].verdict)
        timed = [text for text in rest if find_outcome(first) == "exact" and text.startswith(TIMES)]
        return f"{others[0].label} against {base.label}: {'; '.join([first, *timed[:1]])}."
    found: dict[str, list[str]] = {}
    for group in others:
        found.setdefault(find_outcome(group.verdict), []).append(group.label)
    parts = [f"{word}: {join_names(found[word])}" for word in OUTCOMES if word in found]
    return f"Against {base.label} in {comparison.metric}: {'; '.join(parts)}."


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def find_busy(comparison: Comparison) -> list[str]:
    """Return the labels of the groups whose machine was too busy to time steps; all groups where the baseline's was."""
    slowed = [group.label for group in comparison.groups if group.speed.busy is not None]
    return [group.label for group in comparison.groups] if comparison.groups[0].label in slowed else slowed


def make_board(comparison: Comparison, busy: Sequence[str]) -> Board:
    """Return the leaderboard of all groups. The step times of ``busy`` groups are left out."""
    groups, base = comparison.groups, comparison.groups[0]
    metric = comparison.metric
    own = [Cell(show.of_spread(group.quality.final), _mean(group)) for group in groups]
    plain: list[tuple[str, list[Difference | None], bool]] = [
        ("at equal cost", [_at_equal(group, base) for group in groups], False),
        (f"to {base.label}", [group.quality.difference for group in groups], False),
        ("step time", [None if group.label in busy else group.speed.step_ratio for group in groups], True),
        ("peak memory", [group.cost.peak_ratio for group in groups], True),
    ]
    least = LEAST * abs(_mean(base) or 0.0)
    columns = [(title, _cells(values, least, is_ratio=is_ratio)) for title, values, is_ratio in plain if any(values)]
    titles = (metric, *(title for title, _ in columns))
    rows = zip(own, *(cells for _, cells in columns), strict=True)
    note = (
        f"Differences to {base.label}, paired by seed [95% interval, from three seeds up]; the dashed line is no "
        "difference. At equal cost: at the evaluation nearest to the cost, or else the time, of the cheaper of the two."
    )
    return Board(titles, tuple(BoardRow(n, groups[n].label, cells) for n, cells in enumerate(rows)), note)


def _mean(group: Group) -> float | None:
    return None if group.quality.final is None else group.quality.final.mean


def _at_equal(group: Group, base: Group) -> Difference | None:
    return next((entry.difference for entry in group.quality.at_equal if entry.other == base.label), None)


def _cells(differences: Iterable[Difference | None], least: float, *, is_ratio: bool) -> list[Cell]:
    found = list(differences)
    zero = 1.0 if is_ratio else 0.0
    ends = [end for one in found if one is not None for end in (one.mean, *one.shown) if end is not None]
    low, high = min([zero, *ends]), max([zero, *ends])
    missing = 0.0 if is_ratio else max(0.0, least - (high - low))
    low, high = low - missing / 2, high + missing / 2
    scale = (100.0 - 2 * ROOM) / (high - low or 1.0)

    def place(value: float) -> float:
        return round(ROOM + (value - low) * scale, 1)

    cells = []
    for one in found:
        if one is None:
            cells.append(Cell(show.NONE))
            continue
        first, last = (one.mean if end is None else end for end in one.shown)
        bar = Bar(place(zero), place(first), place(one.mean), place(last))
        cells.append(Cell(show.of_change(one) if is_ratio else show.of_difference(one), one.mean, bar))
    return cells
