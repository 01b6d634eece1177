"""Draw the overview of a comparison, or its curves, to a file, in colours that colour-blind readers can distinguish."""

from __future__ import annotations

import warnings
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli import durable
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.number import split_change
from sparsebp_cli.compare.view import Along, View, place
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run.metric import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
OPTIONS = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
OPTIONS |= {"pdf.fonttype": 42, "svg.fonttype": "none"}  # publishers refuse Type 3 fonts; SVG keeps text as text
# Okabe and Ito's colours, distinct to colour-blind readers; line style and marker differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours: no two of 56 groups look alike
STYLES = ("-", "--", "-.", ":")
LABEL_WIDTH, LEGEND_WIDTH = 16, 32
PHASES = (("forward", "#56B4E9", ""), ("backward", "#D55E00", "//"), ("optimizer", "#999999", ".."))
AXES: dict[Along, str] = {
    "step": "optimizer steps",
    "tokens": "tokens seen",
    "cost": "cost in dense steps",
    "wall_time": "seconds of training, evaluation left out",
}
FEW = 40  # curves with at most so many points get a marker at each point


def picture(comparison: Comparison, path: Path, view: View | None = None) -> Path:
    """Draw a comparison to ``.png``, ``.svg`` or ``.pdf`` and return the path; None means the overview. Raise
    ``UsageError`` for an unsupported view, another suffix or a missing folder."""
    check_path(path)
    if view is not None and view.kind not in ("overview", "curves"):
        raise UsageError(f"a picture shows the overview, or --curves METRIC: leave out --{view.kind}; --html draws it")
    view = view or View()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Show names as text, never as formulas. Ignore the warning that the font draws missing letters as boxes.
    with mpl.rc_context(OPTIONS | {"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure(layout="constrained")
        if view.kind == "curves":
            draw_curve_page(figure, comparison, view.metric or comparison.course, view.along)
        else:
            draw_overview(figure, comparison)
        return save(figure, path)


def check_path(path: Path) -> None:
    """Raise UsageError, before anything is drawn, if the path has no picture suffix or its folder does not exist."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")


def save(figure: Figure, path: Path) -> Path:
    """Write a matplotlib figure to a path, replacing any file there, and return the path. Equal content gives equal
    files."""
    metadata: dict[str, object] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with durable.replacing(path) as stream:
        figure.savefig(stream, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)
    return path


def name(label: str) -> str:
    """Return a group's label, broken into short lines."""
    return "\n".join(wrap(label, LABEL_WIDTH))


def legend_name(label: str) -> str:
    """Return a group's label for a legend, changed if needed: matplotlib drops labels that begin with an underscore."""
    return "\n".join(wrap(f" {label}" if label.startswith("_") else label, LEGEND_WIDTH, drop_whitespace=False))


def legend_room(comparison: Comparison, columns: int) -> float:
    """Return the inches that a legend needs below the axes, beyond the two lines for which every picture has space."""
    lines = sum(legend_name(group.label).count("\n") + 1 for group in comparison.groups)
    return 0.17 * max(0, ceil(lines / columns) - 2)


def line_style(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of a group by its index."""
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
    """Return the text for a drawn metric: name, unit and better direction. For a test metric, which is read once, the
    drawn metric may be the validation's."""
    unit = f" ({comparison.unit})" if comparison.unit else ""
    which = f", {comparison.better} is better" if comparison.better else ""
    return f"{metric}{unit}{which}"


def draw_overview(figure: Figure, comparison: Comparison) -> None:
    """Draw curves at equal steps and at equal cost, and the cost. If no cost is known, draw time instead."""
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
    """Move a value before training that is far from all later ones out of the axes, and write it as text."""
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
    """Draw the cost of all steps, and beside it the change of whole steps if it is not withheld."""
    groups = [(group, group.speed.cost.mean) for group in comparison.groups if group.speed.cost is not None]
    for row, (group, cost) in enumerate(groups):
        axes.barh([row], [cost], color=COLOURS[comparison.groups.index(group) % len(COLOURS)], height=0.55)
        axes.text(cost, row, f" {cost:.2f}{_describe_time(comparison, group)}", va="center", fontsize=8)
    _name_rows(axes, [group for group, _ in groups])
    axes.set(xlabel="FLOPs of all steps over the baseline's", title="cost")


def _draw_phases(axes: Axes, comparison: Comparison) -> None:
    """Draw the phases of a step for groups whose step times are not withheld."""
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
    """Return the median of a step and its change as text, without bold."""
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
    """Draw one line for each counting run with a shared seed. The legend has each group once."""
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
    """Draw a single metric on an empty figure."""
    figure.set_size_inches(7.5, 4.5 + legend_room(comparison, 3))
    axes = figure.subplots()
    draw_curves(axes, comparison, metric, along)
    own = comparison.unit if metric in {comparison.metric, comparison.course} else ""
    unit = METRICS[metric].unit if metric in METRICS else own
    axes.set(xlabel=AXES[along], ylabel=f"{metric} ({unit})" if unit else metric)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
