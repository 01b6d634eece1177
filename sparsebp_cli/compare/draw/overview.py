"""The overview picture: quality against steps and against time, and the phases of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.draw.curve import draw_curves
from sparsebp_cli.compare.draw.style import legend_room, name, quality_label
from sparsebp_cli.compare.question import find_course

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = (("forward", "#56B4E9", ""), ("backward", "#D55E00", "//"), ("optimizer", "#999999", ".."))


def draw_overview(figure: Figure, comparison: Comparison) -> None:
    """Draw curves at equal steps and at equal time, and the phases of a step."""
    figure.set_size_inches(11, 3.8 + legend_room(comparison, 4) + 0.2 * max(0, len(comparison.groups) - 12))
    steps, seconds, phases = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    draw_curves(steps, comparison, find_course(comparison.metric), "step")
    draw_curves(seconds, comparison, find_course(comparison.metric), "wall_time")
    _draw_phases(phases, comparison.groups)
    _cut_the_start(steps, seconds, comparison)
    steps.set(xlabel="optimizer steps", ylabel=quality_label(comparison), title="at equal steps")
    seconds.set(xlabel="seconds of training, evaluation left out", title="at equal time")
    handles, labels = steps.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)


def _cut_the_start(steps: Axes, seconds: Axes, comparison: Comparison) -> None:
    """Leave a value before training that is far from all later ones out of the axes, and write it as text instead."""
    points = [point for run in comparison.runs if run.counts for point in run.curves[find_course(comparison.metric)]]
    first, later = ([p.value for p in points if (p.step == 0) == at_start] for at_start in (True, False))
    span = max(later, default=0.0) - min(later, default=0.0)
    if not first or not span or all(min(later) - span < value < max(later) + span for value in first):
        return
    for axes in (steps, seconds):
        axes.set_ylim(min(later) - 0.08 * span, max(later) + 0.08 * span)
    text = f"before training: {sum(first) / len(first):.3g} (outside)"
    steps.text(0.98, 0.97, text, transform=steps.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _draw_phases(axes: Axes, groups: tuple[Group, ...]) -> None:
    timed = [group for group in groups if group.speed.step]
    left = [0.0] * len(timed)
    for phase, colour, hatch in PHASES:
        widths = [1000 * (getattr(g.speed, phase).median if getattr(g.speed, phase) else 0.0) for g in timed]
        axes.barh(range(len(timed)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, group in enumerate(timed):
        ratio = group.speed.step_ratio
        change = "" if ratio is None else f"  {100 * (ratio.mean - 1):+.0f} %"
        axes.text(left[row], row, f" {1000 * _step(group):.0f} ms{change}", va="center", fontsize=8)
    axes.set_yticks(range(len(timed)), [name(group.label) for group in timed])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set(xlabel="milliseconds a step, median of each phase", title="where a step's time goes")
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=8)


def _step(group: Group) -> float:
    return group.speed.step.median if group.speed.step else 0.0
