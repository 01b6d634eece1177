"""How every picture of a comparison looks."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart; line style and marker differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", "-.", ":")
LABEL_WIDTH = 16


def name(label: str) -> str:
    """Return a group's label, broken into short lines."""
    return "\n".join(wrap(label, LABEL_WIDTH))


def line_style(number: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the group of that number."""
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
    """Return the metric, its unit and which way is better."""
    unit = f" ({comparison.unit})" if comparison.unit else ""
    which = f", {comparison.better} is better" if comparison.better else ""
    return f"{comparison.metric}{unit}{which}"
