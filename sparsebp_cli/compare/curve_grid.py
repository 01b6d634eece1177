"""Make a curve of a comparison as a table of text cells."""

from __future__ import annotations

from collections.abc import Iterator

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import ComparedRun, Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.statistics import spread

MOST_ROWS = 12

Line = list[tuple[int, float]]  # step, value


def curve_grid(comparison: Comparison, metric: str) -> Grid:
    """Return a metric over the steps, one column for each group; without rows if nothing was measured."""
    lines = {
        group.label: [_line(run, metric) for run in comparison.comparable_runs(group)] for group in comparison.groups
    }
    steps = sorted({step for some in lines.values() for line in some for step, _ in line})
    if len(steps) > MOST_ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]
    rows = [
        (f"{at:,}", *(show.of_spread(spread(list(_values_at(some, at)))) for some in lines.values())) for at in steps
    ]
    note = "Mean ± standard deviation (seeds) of the last value up to this point, without interpolation."
    if comparison.shared_seeds:
        shared = set(comparison.shared_seeds)
        short = [group.label for group in comparison.groups if set(group.seeds) == shared]
        why = f": {', '.join(short)} {'have' if len(short) > 1 else 'has'} no other seeds" if short else ""
        note += f" Seeds that the groups share: {', '.join(map(str, sorted(shared)))}{why}."
    return Grid(metric, ("step", *lines), tuple(rows), note)


def _line(run: ComparedRun, metric: str) -> Line:
    return [(point.step, point.value) for point in run.curves.get(metric, ())]


def _values_at(lines: list[Line], at: int) -> Iterator[float]:
    for line in lines:
        before = [value for step, value in line if step <= at]
        if before and line[-1][0] >= 0.95 * at:  # leave out runs that ended before
            yield before[-1]
