"""Draws the overview of a comparison, or one view, to a file, in colours distinct to colour-blind readers."""

from __future__ import annotations

import math
import warnings
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.number import split_change
from sparsebp_cli.compare.trade import find_costs, find_trades
from sparsebp_cli.compare.view import Along, View, place
from sparsebp_cli.run.memory import PARTS, Part
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.run.picture import (
    OPTIONS,
    PANEL,
    PART_COLOURS,
    PART_WORDS,
    WIDTH,
    check_path,
    draw_memory_curves,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.image import AxesImage


# Okabe and Ito's colours, distinct to colour-blind readers; line style and marker differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours: no two of 56 groups look alike
STYLES = ("-", "--", "-.", ":")
LABEL_WIDTH, LEGEND_WIDTH = 16, 32
SHOWN = (("kept_share", "kept share"), ("cosine", "cosine to dense"))
MOST_NAMES = 60  # with more rows there is no room for names
MOST_CURVES = 6  # below each other; the report has all of them
HATCHES: dict[Part, str] = {"weights": "", "gradients": "//", "optimizer": "..", "activations": "xx", "workspace": ""}
PHASES = (("forward", "#56B4E9", ""), ("backward", "#D55E00", "//"), ("optimizer", "#999999", ".."))
AXES: dict[Along, str] = {
    "step": "optimizer steps",
    "tokens": "tokens seen",
    "cost": "cost in dense steps",
    "wall_time": "seconds of training, evaluation left out",
}
FEW = 40  # points of a curve that get a marker each


def picture(comparison: Comparison, path: Path, view: View | None = None) -> Path:
    """Draw a comparison to ``.png``, ``.svg`` or ``.pdf`` and return the path; None is the overview. Raises
    ``UsageError`` for another ending or a missing folder."""
    check_path(path)
    view = view or View()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Names are text, never formulas. The font draws letters that it lacks as boxes: ignore that warning.
    with mpl.rc_context(OPTIONS | {"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure(layout="constrained")
        match view.kind:
            case "curves":
                draw_curve_page(figure, comparison, view.metric or comparison.course, view.along)
            case "pareto":
                draw_pareto(figure, comparison)
            case "layers":
                draw_layers(figure, comparison)
            case "memory":
                draw_memory(figure, comparison)
            case "overview":
                draw_overview(figure, comparison)
        return save(figure, path)


def name(label: str) -> str:
    """Return a group's label, broken into short lines."""
    return "\n".join(wrap(label, LABEL_WIDTH))


def legend_name(label: str) -> str:
    """Return a group's label for a legend: matplotlib leaves out labels that begin with an underscore."""
    return "\n".join(wrap(f" {label}" if label.startswith("_") else label, LEGEND_WIDTH, drop_whitespace=False))


def legend_room(comparison: Comparison, columns: int) -> float:
    """Return the inches that a legend needs below the axes, beyond the two lines that every picture has room for."""
    lines = sum(legend_name(group.label).count("\n") + 1 for group in comparison.groups)
    return 0.17 * max(0, ceil(lines / columns) - 2)


def line_style(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of a group by its number."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number % len(STYLES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def grid_lines(axes: Axes) -> None:
    """Draw thin lines behind the data."""
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def quality_label(comparison: Comparison, metric: str) -> str:
    """Return a metric that is drawn, its unit and its better direction. It may be the validation's counterpart of the
    comparison's, which is read once, on the test split."""
    unit = f" ({comparison.unit})" if comparison.unit else ""
    which = f", {comparison.better} is better" if comparison.better else ""
    return f"{metric}{unit}{which}"


def draw_layers(figure: Figure, comparison: Comparison) -> None:
    """Draw a row of heat maps for each group whose runs recorded layers."""
    groups = [group for group in comparison.groups if group.layers.figures]
    if not groups:
        figure.set_size_inches(6, 2)
        figure.text(0.5, 0.5, "no run recorded its layers", ha="center", va="center")
        return
    rows = [max(2.2, 0.16 * min(len(group.layers.names), MOST_NAMES) + 0.9) for group in groups]
    figure.set_size_inches(10, sum(rows))
    panels = figure.subplots(len(groups), len(SHOWN), squeeze=False, height_ratios=rows)
    for line, group in zip(panels, groups, strict=True):
        for axes, (key, title) in zip(line, SHOWN, strict=True):
            cells = group.layers.figures.get(key)
            if cells is None:
                axes.set_axis_off()
                continue
            numbers = [[math.nan if cell is None else cell for cell in row] for row in cells]
            low = (
                -1.0 if key == "cosine" and min((c for r in cells for c in r if c is not None), default=0) < 0 else 0.0
            )
            drawn: AxesImage = axes.imshow(
                numbers, aspect="auto", cmap="cividis", vmin=low, vmax=1.0, interpolation="none"
            )
            axes.set(
                title=f"{group.label}: {title}", xlabel="optimizer step", facecolor="#e6e6e6"
            )  # where nothing is known
            steps = group.layers.steps
            every = max(1, len(steps) // 8)
            axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]])
            if len(group.layers.names) <= MOST_NAMES and axes is line[0]:
                axes.set_yticks(range(len(group.layers.names)), group.layers.names, fontsize=6)
            else:
                axes.set_yticks([])
            figure.colorbar(drawn, ax=axes, shrink=0.9)


COSTS = {
    "cost": ("cost, in FLOPs of the baseline", "quality and cost", 1.0),
    "step_seconds": ("milliseconds a step (median)", "quality and time", 1000.0),
    "held_bytes": ("memory that a step holds (MB)", "quality and memory", 1e-6),
}


def draw_pareto(figure: Figure, comparison: Comparison) -> None:
    """Draw every group as a point in each cost that is known, and join those on the front."""
    costs = find_costs(find_trades(comparison))
    if not costs:
        figure.set_size_inches(6, 2)
        figure.text(0.5, 0.5, "no cost is known", ha="center", va="center")
        return
    figure.set_size_inches(max(6.0, 4.2 * len(costs)), 4.4 + legend_room(comparison, 4))
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        label, title, scale = COSTS[cost]
        _draw(axes, comparison, cost, scale)
        axes.set(xlabel=label, title=title)
    panels[0].set(ylabel=quality_label(comparison, comparison.metric))
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)


def _draw(axes: Axes, comparison: Comparison, cost: str, scale: float) -> None:
    front = []
    for number, trade in enumerate(find_trades(comparison, cost)):
        x, y = trade.costs.get(cost), trade.quality
        if x is None or y is None:
            continue
        style = line_style(number)
        axes.errorbar(
            [x * scale],
            [y],
            yerr=None if trade.sd is None else [trade.sd],
            color=style["color"],
            marker=style["marker"],
            markersize=8,
            capsize=3,
            linestyle="none",
            label=legend_name(trade.label),
        )
        if trade.is_paired and not trade.beaten_by:
            front.append((x * scale, y))
    if len(front) > 1:
        front.sort()
        axes.plot([x for x, _ in front], [y for _, y in front], color="#888888", linewidth=1, zorder=0)
    if comparison.better == "lower":
        # The panels share this axis: a second inversion would undo the first.
        axes.invert_yaxis() if not axes.yaxis_inverted() else None
    grid_lines(axes)
    axes.margins(0.12)


def draw_memory(figure: Figure, comparison: Comparison) -> None:
    """Draw the parts of every group, and the curves of groups with watched steps."""
    groups = [group for group in comparison.groups if any(part is not None for part in _parts(group).values())]
    curves = [
        (f"{group.label}: step {group.memory.step}", group.memory.curve) for group in groups if group.memory is not None
    ][:MOST_CURVES]
    heights = [1.7 + 0.5 * max(1, len(groups)), *([PANEL * len(curves)] if curves else [])]
    figure.set_size_inches(WIDTH, sum(heights))
    if not curves:
        _draw_bars(figure, groups, has_legend=True)
        return
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    _draw_bars(halves[0], groups, has_legend=False)
    draw_memory_curves(halves[1], curves)


def _parts(group: Group) -> dict[Part, float | None]:
    """The parts at the peak of a watched step; else each part by itself, and without the workspace."""
    cost = group.cost
    if cost.step_peak is not None:
        return {part: float(getattr(cost.step_peak, part)) for part in PARTS}
    return {
        "weights": cost.weight_bytes,
        "gradients": cost.gradient_bytes,
        "optimizer": cost.optimizer_bytes,
        "activations": cost.saved_bytes,
    }


def _draw_bars(figure: FigureBase, groups: list[Group], *, has_legend: bool) -> None:
    """Draw the bars, and next to each the peak of the device or process, which also holds memory outside the parts."""
    axes = figure.subplots()
    left = [0.0] * len(groups)
    for part in PARTS:
        widths = [(_parts(group).get(part) or 0.0) / 1e6 for group in groups]
        if any(widths):
            axes.barh(
                range(len(groups)),
                widths,
                left=left,
                label=PART_WORDS[part],
                color=PART_COLOURS[part],
                hatch=HATCHES[part],
                edgecolor="white",
            )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, group in enumerate(groups):
        axes.text(left[row], row, f" {_bar_label(group, left[row])}", va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), [name(group.label) for group in groups])
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set(xlabel="MB")
    if any(group.cost.step_peak for group in groups):
        axes.set_title("at the highest moment of a watched step", loc="left", fontsize=9)
    if groups and has_legend:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)


def _bar_label(group: Group, sum_megabytes: float) -> str:
    parts = [f"{sum_megabytes:.4g} MB"] if group.cost.step_peak is not None else []
    if group.cost.peak_bytes is not None:
        parts.append(f"peak {group.cost.peak_bytes / 1e6:.0f} MB ({group.cost.peak_of})")
    return "; ".join(parts)


def draw_overview(figure: Figure, comparison: Comparison) -> None:
    """Draw curves at equal steps and at equal cost, and the cost; where none is known, time instead."""
    figure.set_size_inches(11, 3.8 + legend_room(comparison, 4) + 0.2 * max(0, len(comparison.groups) - 12))
    steps, costs, bars = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    course, is_counted = comparison.course, any(g.speed.cost for g in comparison.groups)
    along: Along = "cost" if is_counted else "wall_time"
    draw_curves(steps, comparison, course, "step")
    draw_curves(costs, comparison, course, along)
    _draw_costs(bars, comparison) if is_counted else _draw_phases(bars, comparison)
    _cut_the_start(steps, costs, comparison)
    steps.set(xlabel=AXES["step"], ylabel=quality_label(comparison, course), title="at equal steps")
    costs.set(xlabel=AXES[along], title="at equal cost" if is_counted else "at equal time")
    handles, labels = steps.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)


def _cut_the_start(steps: Axes, costs: Axes, comparison: Comparison) -> None:
    """Leave a value before training that is far from all later ones out of the axes, and write it as text instead."""
    points = [point for run in comparison.runs if run.counts for point in run.curves[comparison.course]]
    first, later = ([p.value for p in points if (p.step == 0) == at_start] for at_start in (True, False))
    span = max(later, default=0.0) - min(later, default=0.0)
    if not first or not span or all(min(later) - span < value < max(later) + span for value in first):
        return
    for axes in (steps, costs):
        axes.set_ylim(min(later) - 0.08 * span, max(later) + 0.08 * span)
    text = f"before training: {sum(first) / len(first):.3g} (outside)"
    steps.text(0.98, 0.97, text, transform=steps.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _draw_costs(axes: Axes, comparison: Comparison) -> None:
    """Draw the cost of all steps, and write the change of whole steps beside it where it is not withheld."""
    groups = [(group, group.speed.cost.mean) for group in comparison.groups if group.speed.cost is not None]
    for row, (group, cost) in enumerate(groups):
        axes.barh([row], [cost], color=COLOURS[comparison.groups.index(group) % len(COLOURS)], height=0.55)
        axes.text(cost, row, f" {cost:.2f}{_describe_time(comparison, group)}", va="center", fontsize=8)
    _name_rows(axes, [group for group, _ in groups])
    axes.set(xlabel="FLOPs of all steps over the baseline's", title="cost")


def _draw_phases(axes: Axes, comparison: Comparison) -> None:
    """Draw the phases of a step, of groups whose step times are not withheld."""
    timed = [group for group in comparison.groups if group.speed.step]
    left = [0.0] * len(timed)
    for phase, colour, hatch in PHASES:
        widths = [1000 * (getattr(g.speed, phase).median if getattr(g.speed, phase) else 0.0) for g in timed]
        axes.barh(range(len(timed)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, group in enumerate(timed):
        axes.text(left[row], row, _describe_time(comparison, group), va="center", fontsize=8)
    _name_rows(axes, timed)
    axes.set(xlabel="milliseconds a step, median of each phase", title="where a step's time goes")
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=8)


def _describe_time(comparison: Comparison, group: Group) -> str:
    """The median of a step and its change; bold is left to tables."""
    step, ratio = group.speed.step, group.speed.step_ratio
    if step is None:
        return ", times withheld" if group.speed.withheld else ""
    change = "" if ratio is None or group is comparison.groups[0] else f", {split_change(ratio)[0]}"
    return f", {1000 * step.median:.0f} ms{change}"


def _name_rows(axes: Axes, groups: list[Group]) -> None:
    axes.set_yticks(range(len(groups)), [name(group.label) for group in groups])
    axes.invert_yaxis()
    axes.margins(x=0.6)


def draw_curves(axes: Axes, comparison: Comparison, metric: str, along: Along) -> None:
    """Draw one line for each counting run with a shared seed; the legend has each group once."""
    for number, group in enumerate(comparison.groups):
        lines = [
            [(x, point.value) for point in run.curves.get(metric, ()) if (x := place(point, along, group)) is not None]
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
    own = comparison.unit if metric in {comparison.metric, comparison.course} else ""
    unit = METRICS[metric].unit if metric in METRICS else own
    axes.set(xlabel=AXES[along], ylabel=f"{metric} ({unit})" if unit else metric)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
