"""Make the first screen of the report: one sentence, and the leaderboard with its intervals.

Both only repeat the comparison. The sentence sorts groups by their statements on quality, and the cells are the numbers
of the tables, in the same format. A gain is marked only if a statement supports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.statement import OUTCOMES, Outcome, Statement, Subject
from sparsebp_cli.compare.statistics import Difference
from sparsebp_cli.compare.words import say

MOST_NAMES = 6
ROOM = 6.0  # of 100, space at both ends of a bar
RATIOS = {"step time", "memory"}  # subjects whose numbers are ratios
LEAST = 1e-4  # of the baseline's value: the finest scale of differences, so that rounding stays at zero
OTHER_TRAINING = "after other steps or with another batch"
HEADINGS: dict[Outcome, str] = {"lower": f"lower {OTHER_TRAINING}", "higher": f"higher {OTHER_TRAINING}"}


@dataclass(frozen=True)
class Bar:
    """An interval on the scale of its column, from 0 to 100. Without one, ``low`` and ``high`` equal ``mean``."""

    zero: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One value of the leaderboard. Rows sort by ``value``, with None last."""

    text: str
    value: float | None = None
    bar: Bar | None = None
    interval: str = ""  # in square brackets
    is_gain: bool = False  # whether a statement shows that it is better than the baseline's


@dataclass(frozen=True)
class BoardRow:
    """One group, by its index in the comparison, which determines colour and mark."""

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
    """Return one sentence: the main finding of the only group, with its time if exact, or the groups by finding."""
    base, *others = comparison.groups
    if not others:
        return f"{base.label} alone: there is nothing to compare it with."
    if len(others) == 1:
        return f"{others[0].label} against {base.label}: {'; '.join(map(say, find_main(others[0])))}."
    labels: dict[Outcome, list[str]] = {}
    for group in others:
        if (quality := group.find("quality")) is not None:
            labels.setdefault(quality.outcome, []).append(group.label)
    parts = [f"{HEADINGS.get(word, word)}: {join_names(labels[word])}" for word in OUTCOMES if word in labels]
    return f"Against {base.label} in {comparison.metric}: {'; '.join(parts)}."


def find_main(group: Group) -> list[Statement]:
    """Return the statement on quality, and for an exact policy also those on cost and step time. All are over all
    steps."""
    quality = group.find("quality")
    saved = (group.find("cost"), group.find("step time")) if quality and quality.outcome == "exact" else ()
    return [one for one in (quality, *saved) if one is not None and (one.numbers or one is quality)]


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def find_withheld(comparison: Comparison) -> list[str]:
    """Return the labels of the groups whose step times are withheld."""
    return [group.label for group in comparison.groups if group.speed.withheld]


def make_board(comparison: Comparison) -> Board:
    """Return the leaderboard of all groups."""
    groups, base = comparison.groups, comparison.groups[0]
    own = [
        Cell(show.of_spread(group.quality.final), _mean(group), is_gain=comparison.is_gain(group, "quality"))
        for group in groups
    ]
    plain: list[tuple[str, list[Difference | None], Subject | None]] = [
        (f"to {base.label}", [group.quality.difference for group in groups], "quality"),
        (f"{_course(comparison)}at equal cost", [_at_equal(group, base) for group in groups], None),
        ("step time", [group.speed.step_ratio for group in groups], "step time"),
        ("memory held", [group.cost.held_ratio for group in groups], "memory"),
    ]
    least = LEAST * abs(_mean(base) or 0.0)
    columns = [
        (title, _mark(comparison, _cells(values, least, is_ratio=subject in RATIOS), subject))
        for title, values, subject in plain
        if any(values)
    ]
    if any(group.speed.cost is not None for group in groups):
        columns.insert(0, ("cost", [_cost(group) for group in groups]))
    titles = (comparison.metric, *(title for title, _ in columns))
    rows = zip(own, *(cells for _, cells in columns), strict=True)
    kind = comparison.interval_kind or "95% interval, from three seeds up"
    note = (
        f"Differences to {base.label}, paired by seed [{kind}]; the dashed line means no difference. Cost: FLOPs of "
        "all steps divided by the baseline's (of older runs: from probes). At equal cost: at the evaluation nearest "
        "to the cost (else the time) of the cheaper group; these intervals are not simultaneous."
    )
    return Board(titles, tuple(BoardRow(n, groups[n].label, cells) for n, cells in enumerate(rows)), note)


def _course(comparison: Comparison) -> str:
    """Return the metric of the equal-cost column if it differs from the other columns' metric, else an empty text."""
    return "" if comparison.course == comparison.metric else f"{comparison.course} "


def _mark(comparison: Comparison, cells: list[Cell], subject: Subject | None) -> list[Cell]:
    if subject is None:
        return cells
    return [
        replace(cell, is_gain=comparison.is_gain(group, subject))
        for cell, group in zip(cells, comparison.groups, strict=True)
    ]


def _cost(group: Group) -> Cell:
    cost = group.speed.cost
    return Cell(show.of_ratio(cost), None if cost is None else cost.mean)


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
        text, interval = show.split_change(one) if is_ratio else show.split_difference(one)
        cells.append(Cell(text, one.mean, bar, interval))
    return cells
