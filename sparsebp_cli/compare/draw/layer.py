"""Kept share and fidelity of the gradient by layer and step, as heat maps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sparsebp_cli.compare.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (("kept_share", "kept share"), ("cosine", "cosine to dense"))
MOST_NAMES = 60  # with more rows there is no room for names


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
            drawn: Any = axes.imshow(numbers, aspect="auto", cmap="cividis", vmin=low, vmax=1.0, interpolation="none")
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
