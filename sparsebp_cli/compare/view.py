"""Make the curves of a comparison as tables for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import ComparedRun, Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import Point
from sparsebp_cli.compare.statistics import spread

MOST_ROWS = 12
Along = Literal["step", "tokens", "cost", "wall_time"]


@dataclass(frozen=True)
class View:
    """The curves of one metric, instead of all tables of a comparison."""

    metric: str
    along: Along = "step"  # the horizontal axis


def view_grid(comparison: Comparison, view: View) -> Grid:
    """Return the curves of a metric as a table; without rows if nothing was measured."""
    metric, along = view.metric, view.along
    lines = {
        group.label: [_line(run, metric, along, group) for run in comparison.comparable_runs(group)]
        for group in comparison.groups
    }
    rows = []
    for at in _places([line for some in lines.values() for line in some], along):
        cells = [show.of_spread(spread(_values_at(some, at))) for some in lines.values()]
        rows.append((f"{at:.3g} s" if along == "wall_time" else f"{at:,.0f}", *cells))
    heads = {"step": "step", "tokens": "tokens", "cost": "dense steps", "wall_time": "training time"}
    note = "Mean ± standard deviation (seeds) of the last value up to this point, without interpolation."
    if comparison.shared_seeds:
        shared = set(comparison.shared_seeds)
        short = [group.label for group in comparison.groups if set(group.seeds) == shared]
        why = f": {', '.join(short)} {'have' if len(short) > 1 else 'has'} no other seeds" if short else ""
        note += f" Seeds that the groups share: {', '.join(map(str, sorted(shared)))}{why}."
    return Grid(metric, (heads[along], *lines), tuple(rows), note)


def place(point: Point, along: Along, group: Group) -> float | None:
    """Return the position of a group's point along an axis; None if unknown."""
    match along:
        case "cost":
            return None if group.speed.relative_cost is None else point.step * group.speed.relative_cost
        case "step":
            return float(point.step)
        case "tokens":
            return point.tokens
        case "wall_time":
            return point.seconds


Line = list[tuple[float, float]]


def _line(run: ComparedRun, metric: str, along: Along, group: Group) -> Line:
    points = run.curves.get(metric, ())
    return [(x, point.value) for point in points if (x := place(point, along, group)) is not None]


def _places(lines: list[Line], along: Along) -> list[float]:
    """Return the positions of the rows: steps and tokens with measurements, or evenly spaced times."""
    found = sorted({x for line in lines for x, _ in line})
    if along in {"wall_time", "cost"} and found:
        return [found[-1] * part / (MOST_ROWS - 2) for part in range(MOST_ROWS - 1)]
    if len(found) <= MOST_ROWS:
        return found
    return [found[round(i * (len(found) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def _values_at(lines: list[Line], at: float) -> list[float]:
    found = []
    for line in lines:
        # Row positions are computed: rounding must not lose the value at that position.
        before = [y for x, y in line if x <= at * 1.0001]
        if before and line[-1][0] >= 0.95 * at:  # leave out runs that ended before
            found.append(before[-1])
    return found
