"""Quality against step time and against memory, with the Pareto front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.draw.style import grid_lines, legend_name, legend_room, line_style, quality_label
from sparsebp_cli.compare.trade import find_trades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_pareto(figure: Figure, comparison: Comparison) -> None:
    """Draw every group as a point, and join those on the front."""
    figure.set_size_inches(10, 4.4 + legend_room(comparison, 4))
    time, memory = figure.subplots(1, 2, sharey=True)
    _draw(time, comparison, "step_seconds", 1000.0)
    _draw(memory, comparison, "peak_bytes", 1e-9)
    time.set(xlabel="milliseconds a step (median)", ylabel=quality_label(comparison), title="quality and time")
    memory.set(xlabel="peak memory (GB)", title="quality and memory")
    handles, labels = time.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)


def _draw(axes: Axes, comparison: Comparison, cost: str, scale: float) -> None:
    front = []
    for number, trade in enumerate(find_trades(comparison, cost)):
        x, y = trade.costs.get(cost), trade.quality
        if x is None or y is None:
            continue
        style = line_style(number)
        axes.errorbar(
            [x * scale],
            [y],
            yerr=None if trade.sd is None else [trade.sd],
            color=style["color"],
            marker=style["marker"],
            markersize=8,
            capsize=3,
            linestyle="none",
            label=legend_name(trade.label),
        )
        if trade.is_paired and not trade.beaten_by:
            front.append((x * scale, y))
    if len(front) > 1:
        front.sort()
        axes.plot([x for x, _ in front], [y for _, y in front], color="#888888", linewidth=1, zorder=0)
    if comparison.better == "lower":
        axes.invert_yaxis() if not axes.yaxis_inverted() else None
    grid_lines(axes)
    axes.margins(0.12)
