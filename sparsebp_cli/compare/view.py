"""Make single views of a comparison as tables for the terminal: curves or layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Literal

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import ComparedRun, Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import Point
from sparsebp_cli.compare.measured import Layers
from sparsebp_cli.compare.statistics import spread

MOST_ROWS = 12
MOST_LAYERS = 40
SHADES = " ░▒▓█"
Kind = Literal["overview", "curves", "layers"]
Along = Literal["step", "tokens", "cost", "wall_time"]


@dataclass(frozen=True)
class View:
    """The part of a comparison to show."""

    kind: Kind = "overview"  # ``overview`` shows everything
    metric: str | None = None  # for ``curves``; None: the quality metric
    along: Along = "step"  # for ``curves``: the horizontal axis


def view_grids(comparison: Comparison, view: View) -> list[Grid]:
    """Return the tables of a view other than the overview. A table without rows means that nothing was measured."""
    match view.kind:
        case "curves":
            return [_curves(comparison, view.metric or comparison.course, view.along)]
        case _:
            return [_layers(group) for group in comparison.groups if group.layers.figures] or [_no_layers()]


def _curves(comparison: Comparison, metric: str, along: Along) -> Grid:
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


def _layers(group: Group) -> Grid:
    layers = group.layers if len(group.layers.names) <= MOST_LAYERS else _by_block(group.layers)
    rows = []
    for number, name in enumerate(layers.names[:MOST_LAYERS]):
        cells = [name]
        for figure in ("kept_share", "cosine"):
            row = layers.figures[figure][number] if figure in layers.figures else ()
            known = [cell for cell in row if cell is not None]
            cells += [show.of_plain(fmean(known), 2) if known else show.NONE, _shade(row)]
        rows.append(tuple(cells))
    steps = f"steps {layers.steps[0]} to {layers.steps[-1]}" if layers.steps else "no steps"
    note = f"Mean over {steps}, and each step as a shade from 0 (empty) to 1 (full)."
    if len(layers.names) > MOST_LAYERS:
        note += f" {len(layers.names) - MOST_LAYERS} more are in -o json and in pictures."
    columns = ("layer", "kept", "over steps", "cosine", "over steps ")
    return Grid(f"Layers of {group.label}", columns, tuple(rows), note)


def _by_block(layers: Layers) -> Layers:
    """Merge layers that share the path up to the first number into one row, if a screen cannot hold all."""
    blocks: dict[str, list[int]] = {}
    for place_of, name in enumerate(layers.names):
        match = re.match(r"(.*?\d+)(?:\.|$)", name)
        blocks.setdefault(f"{match[1]}.*" if match else name, []).append(place_of)
    figures = {
        figure: tuple(
            tuple(_mean([rows[i][step] for i in places]) for step in range(len(layers.steps)))
            for places in blocks.values()
        )
        for figure, rows in layers.figures.items()
    }
    return Layers(layers.steps, tuple(blocks), figures)


def _mean(cells: Sequence[float | None]) -> float | None:
    known = [cell for cell in cells if cell is not None]
    return fmean(known) if known else None


def _shade(row: Sequence[float | None]) -> str:
    thinned = row if len(row) <= 24 else [row[round(i * (len(row) - 1) / 23)] for i in range(24)]
    return "".join("·" if c is None else SHADES[ceil(min(1.0, max(0.0, c)) * (len(SHADES) - 1))] for c in thinned)


def _no_layers() -> Grid:
    note = "None of these runs recorded its layers."
    return Grid("Layers", ("layer",), (), note)
