"""The memory of a step: a bar of its parts for each group, and the curves of watched steps below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.draw.style import name
from sparsebp_cli.run.memory import PARTS, Part
from sparsebp_cli.run.picture import COLOURS, PANEL, WIDTH, WORDS, draw_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure, FigureBase

MOST_CURVES = 6  # below each other; the report has all of them
HATCHES: dict[Part, str] = {"weights": "", "gradients": "//", "optimizer": "..", "activations": "xx", "workspace": ""}


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
    draw_curves(halves[1], curves)


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
            look: dict[str, Any] = {"color": COLOURS[part], "hatch": HATCHES[part], "edgecolor": "white"}
            axes.barh(range(len(groups)), widths, left=left, label=WORDS[part], **look)
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
