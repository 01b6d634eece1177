"""Colours, lines and labels of the pictures of a comparison."""

from __future__ import annotations

from math import ceil
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct to colour-blind readers; line style and marker differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours: no two of 56 groups look alike
STYLES = ("-", "--", "-.", ":")
LABEL_WIDTH, LEGEND_WIDTH = 16, 32


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


def quality_label(comparison: Comparison) -> str:
    """Return the metric, its unit and its better direction."""
    unit = f" ({comparison.unit})" if comparison.unit else ""
    which = f", {comparison.better} is better" if comparison.better else ""
    return f"{comparison.metric}{unit}{which}"
