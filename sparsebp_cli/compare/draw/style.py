"""How every picture looks, and how it becomes a file."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; line style and marker differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", "-.", ":")
LABEL_WIDTH = 16
ENDINGS = (".png", ".svg", ".pdf")
OPTIONS = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def check_path(path: Path) -> None:
    """Refuse a file that no picture can become, before anything is drawn.

    Args:
        path: Where to.

    Raises:
        UsageError: The ending is not one of a picture, or the folder does not exist.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")


def save(figure: Figure, path: Path) -> Path:
    """Write a picture; the same comparison gives the same file.

    Args:
        figure: Of matplotlib.
        path: Where to; it is replaced.

    Returns:
        The path.
    """
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=metadata)
    return path


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
