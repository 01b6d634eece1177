"""Of what the memory of a step consists, and the peak that was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.draw.style import name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = (
    ("weight_bytes", "weights", "#0072B2", ""),
    ("gradient_bytes", "gradients", "#D55E00", "//"),
    ("optimizer_bytes", "optimizer", "#009E73", ".."),
    ("saved_bytes", "saved for backward", "#E69F00", "xx"),
)


def draw_memory(figure: Figure, comparison: Comparison) -> None:
    """Draw a bar a group, in its parts; the peak is written beside it, for it also holds what is in no part.

    Args:
        figure: Empty.
        comparison: What was compared.
    """
    groups = [g for g in comparison.groups if any(getattr(g.cost, part) is not None for part, *_ in PARTS)]
    figure.set_size_inches(8, 1.6 + 0.5 * max(1, len(groups)))
    axes = figure.subplots()
    left = [0.0] * len(groups)
    for part, word, colour, hatch in PARTS:
        widths = [(getattr(group.cost, part) or 0.0) / 1e6 for group in groups]
        axes.barh(range(len(groups)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", label=word)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, group in enumerate(groups):
        if group.cost.peak_bytes is not None:
            peak = f" peak {group.cost.peak_bytes / 1e6:.0f} MB ({group.cost.peak_of})"
            axes.text(left[row], row, peak, va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), [name(group.label) for group in groups])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set(xlabel="MB")
    if groups:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
