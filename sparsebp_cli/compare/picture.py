"""One picture of a comparison: quality against steps and against time, and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart; line style and marker differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", "-.", ":")
PHASES = (("forward", "#56B4E9", ""), ("backward", "#D55E00", "//"), ("optimizer", "#999999", ".."))
LABEL_WIDTH = 16
ENDINGS = (".png", ".svg", ".pdf")


def picture(comparison: Comparison, path: Path) -> Path:
    """Draw a comparison.

    Args:
        comparison: What was compared.
        path: Where to; ``.png``, ``.svg`` or ``.pdf``. It is replaced.

    Returns:
        The path.

    Raises:
        UsageError: The ending is another one, or the folder does not exist.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    options = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(options):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        steps, seconds, phases = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        _draw_curves(steps, comparison, along=0)
        _draw_curves(seconds, comparison, along=1)
        _draw_phases(phases, comparison.groups)
        _cut_the_start(steps, seconds, comparison)
        steps.set(xlabel="optimizer steps", ylabel=_quality_label(comparison), title="at equal steps")
        seconds.set(xlabel="seconds of training, evaluation left out", title="at equal time")
        handles, labels = steps.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def _quality_label(comparison: Comparison) -> str:
    unit = f" ({comparison.unit})" if comparison.unit else ""
    which = f", {comparison.better} is better" if comparison.better else ""
    return f"{comparison.metric}{unit}{which}"


def _draw_curves(axes: Axes, comparison: Comparison, along: int) -> None:
    """One line a run, runs of a group in one colour; the group's name once."""
    for number, group in enumerate(comparison.groups):
        runs = [run for run in comparison.runs if run.group == group.group and run.counts and run.curve]
        for index, run in enumerate(runs):
            axes.plot(
                [point[along] for point in run.curve],
                [point[2] for point in run.curve],
                color=COLOURS[number % len(COLOURS)],
                linestyle=STYLES[number % len(STYLES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                linewidth=1.4,
                alpha=0.85 if len(runs) == 1 else 0.6,
                label=f"{group.label} ({len(runs)} seed{'s' * (len(runs) > 1)})" if index == 0 else None,
            )
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _cut_the_start(steps: Axes, seconds: Axes, comparison: Comparison) -> None:
    """A value before training that lies far from all later ones would press them together: it is told instead."""
    points = [point for run in comparison.runs if run.counts for point in run.curve]
    first, later = ([value for step, _, value in points if (step == 0) == at_start] for at_start in (True, False))
    span = max(later, default=0.0) - min(later, default=0.0)
    if not first or not span or all(min(later) - span < value < max(later) + span for value in first):
        return
    for axes in (steps, seconds):
        axes.set_ylim(min(later) - 0.08 * span, max(later) + 0.08 * span)
    told = f"before training: {sum(first) / len(first):.3g} (outside)"
    steps.text(0.98, 0.97, told, transform=steps.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _draw_phases(axes: Axes, groups: tuple[Group, ...]) -> None:
    timed = [group for group in groups if group.speed.step]
    left = [0.0] * len(timed)
    for name, colour, hatch in PHASES:
        widths = [1000 * (getattr(g.speed, name).median if getattr(g.speed, name) else 0.0) for g in timed]
        axes.barh(range(len(timed)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, group in enumerate(timed):
        factor = "" if group.speed.speedup is None else f"  {group.speed.speedup:.2f}x"
        axes.text(left[row], row, f" {1000 * _step(group):.0f} ms{factor}", va="center", fontsize=8)
    axes.set_yticks(range(len(timed)), ["\n".join(wrap(group.label, LABEL_WIDTH)) for group in timed])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set(xlabel="milliseconds a step, median of each phase", title="where a step's time goes")
    if timed:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=8)


def _step(group: Group) -> float:
    return group.speed.step.median if group.speed.step else 0.0
