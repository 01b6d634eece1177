"""A metric against steps, tokens or time: one line a run, one colour a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.draw.style import grid_lines, legend_name, legend_room, line_style
from sparsebp_cli.compare.loaded import Point
from sparsebp_cli.run.metric import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Along = Literal["step", "tokens", "wall_time"]
AXES: dict[Along, str] = {
    "step": "optimizer steps",
    "tokens": "tokens seen",
    "wall_time": "seconds of training, evaluation left out",
}
FEW = 40  # points of a curve that get a marker each


def place(point: Point, along: Along) -> float | None:
    """Return a point's position along an axis; None when unknown."""
    match along:
        case "step":
            return float(point.step)
        case "tokens":
            return point.tokens
        case "wall_time":
            return point.seconds


def draw_curves(axes: Axes, comparison: Comparison, metric: str, along: Along) -> None:
    """Draw one line for each counting run with a shared seed; the legend has each group once."""
    for number, group in enumerate(comparison.groups):
        lines = [
            [(x, point.value) for point in run.curves.get(metric, ()) if (x := place(point, along)) is not None]
            for run in comparison.comparable_runs(group)
        ]
        lines = [line for line in lines if line]
        for index, line in enumerate(lines):
            style = line_style(number) | ({"marker": None} if len(line) > FEW else {})
            axes.plot(
                [x for x, _ in line],
                [y for _, y in line],
                **style,
                markersize=4,
                linewidth=1.4,
                alpha=0.85 if len(lines) == 1 else 0.6,
                label=f"{legend_name(group.label)} ({len(lines)} seed{'s' * (len(lines) > 1)})" if index == 0 else None,
            )
    grid_lines(axes)


def draw_curve_page(figure: Figure, comparison: Comparison, metric: str, along: Along) -> None:
    """Draw one metric alone on an empty figure."""
    figure.set_size_inches(7.5, 4.5 + legend_room(comparison, 3))
    axes = figure.subplots()
    draw_curves(axes, comparison, metric, along)
    unit = METRICS[metric].unit if metric in METRICS else ""
    axes.set(xlabel=AXES[along], ylabel=f"{metric} ({unit})" if unit else metric)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
