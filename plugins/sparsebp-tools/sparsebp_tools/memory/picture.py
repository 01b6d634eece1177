"""Draw the memory of a step. Equal pictures give equal files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import UsageError
from sparsebp_tools.memory.curve import PARTS, MemoryCurve, Part, Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase


ENDINGS = (".png", ".svg", ".pdf")
OPTIONS = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
OPTIONS |= {"pdf.fonttype": 42, "svg.fonttype": "none"}  # publishers refuse Type 3 fonts; SVG keeps text as text


def check_path(path: Path) -> None:
    """Raise UsageError, before anything is drawn, if the path has no picture suffix or its folder does not exist."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")


def save(figure: Figure, path: Path) -> Path:
    """Write a matplotlib figure to a path, replacing any file there, and return the path."""
    metadata: dict[str, object] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)
    return path


# Okabe and Ito's palette, which colour-blind readers can distinguish.
PART_COLOURS: dict[Part, str] = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "workspace": "#999999",
}
PART_WORDS: dict[Part, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations",
    "workspace": "workspace",
}
WIDTH, PANEL, BELOW = 8.5, 3.1, 0.7  # inches: width of a picture, heights of a panel and of the legend
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_NARROW = 0.06  # phases below this fraction of the width get no label


def save_curves(curves: Sequence[tuple[str, MemoryCurve]], path: Path) -> Path:
    """Draw curves below each other on one scale of bytes, each with its title unless it is empty. Replace the file at
    the path and return the path. Raise UsageError if its suffix is not a picture's, or its folder does not exist."""
    check_path(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(OPTIONS):
        figure = Figure(figsize=(WIDTH, BELOW + PANEL * len(curves)), layout="constrained")
        draw_memory_curves(figure, curves)
        return save(figure, path)


def draw_memory_curves(figure: FigureBase, curves: Sequence[tuple[str, MemoryCurve]]) -> None:
    """Draw curves below each other on one scale of bytes, each over its own time, into an empty figure. The figure must
    be :data:`WIDTH` wide; its height is :data:`PANEL` a curve plus :data:`BELOW`."""
    highest = max(curve.peak.split.total for _, curve in curves)
    scale, unit = next((pair for pair in _UNITS if highest >= pair[0]), _UNITS[-1])
    panels = figure.subplots(len(curves), squeeze=False)[:, 0]
    for axes, (title, curve) in zip(panels, curves, strict=True):
        _draw(axes, curve, scale, unit)
        axes.set_ylim(0, highest / scale * 1.18)
        axes.set(ylabel=f"live ({unit})")
        if title:
            axes.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=14)
    panels[-1].set_xlabel("milliseconds into the step (a traced step is slower than others)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False)


def _draw(axes: Axes, curve: MemoryCurve, scale: float, unit: str) -> None:
    times = [point.seconds * 1e3 for point in curve.points]
    layers = [[getattr(point.split, part) / scale for point in curve.points] for part in PARTS]
    axes.stackplot(
        times,
        layers,
        labels=[PART_WORDS[part] for part in PARTS],
        colors=[PART_COLOURS[part] for part in PARTS],
        step="post",
        linewidth=0,
    )
    axes.margins(x=0)
    _draw_phases(axes, curve, times)
    peak = curve.peak
    at, height = peak.seconds * 1e3, peak.split.total / scale
    axes.plot([at], [height], marker="v", color="black", markersize=5, clip_on=False)
    late = at > times[0] + 0.6 * (times[-1] - times[0])
    axes.annotate(
        f"peak {height:.4g} {unit}",
        (at, height),
        xytext=(-7 if late else 7, 3),
        textcoords="offset points",
        ha="right" if late else "left",
    )


def _draw_phases(axes: Axes, curve: MemoryCurve, times: list[float]) -> None:
    width = (times[-1] - times[0]) or 1.0
    for phase, start, end in _phases(curve, times):
        if start > times[0]:
            axes.axvline(start, color="#444444", linewidth=0.8, linestyle="--")
        if end - start > _NARROW * width:
            axes.text((start + end) / 2, 1.01, phase, transform=axes.get_xaxis_transform(), ha="center", va="bottom")


def _phases(curve: MemoryCurve, times: list[float]) -> Iterator[tuple[Phase, float, float]]:
    """Yield each phase with its first and last moment. A phase that occurs twice is yielded twice."""
    turns = [0] + [n for n, (a, b) in enumerate(pairwise(curve.points), 1) if a.phase != b.phase]
    for first, last in zip(turns, [*turns[1:], len(times) - 1], strict=True):
        yield curve.points[first].phase, times[first], times[last]
