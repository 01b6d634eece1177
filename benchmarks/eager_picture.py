"""Draws the results of `eager.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sparsebp_tools.memory.curve import MemoryCurve
from sparsebp_tools.memory.picture import OPTIONS, PART_COLOURS, PART_WORDS, draw_memory_curves, save

LIMIT = 1.3  # the idea's author reached it with a low-rank optimizer


def draw(result: dict[str, Any], curves: dict[str, MemoryCurve], path: Path) -> None:
    """Draw memory held, memory over a step, and the cost of hooks."""
    with mpl.rc_context(OPTIONS):
        figure = Figure(figsize=(13.0, 3.1 * max(2, len(curves))), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=[1.0, 1.3])
        bars, hooks = left.subplots(2, 1)
        _draw_bars(bars, result["memory"])
        _draw_hooks(hooks, result["hook_seconds"])
        draw_memory_curves(right, list(curves.items()))
        save(figure, path)


def _draw_bars(axes: Any, memory: dict[str, Any]) -> None:
    rows = [(name, update, values[update]) for name, values in memory.items() for update in ("deferred", "eager")]
    bottom = [0.0] * len(rows)
    places = list(range(len(rows)))
    for part, key in (("weights", "weight_bytes"), ("gradients", "gradient_bytes"), ("optimizer", "optimizer_bytes")):
        heights = [row[key] / row["weight_bytes"] for _, _, row in rows]
        axes.bar(places, heights, bottom=bottom, color=PART_COLOURS[part], label=PART_WORDS[part])
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for place, height in zip(places, bottom, strict=True):
        axes.annotate(f"{height:.2f}", (place, height), ha="center", va="bottom")
    axes.axhline(LIMIT, color="black", linestyle="--", linewidth=1.0, label=f"{LIMIT} times the weights")
    axes.set_xticks(places, [f"{name}\n{update}" for name, update, _ in rows])
    axes.set(ylabel="times the weights", title="weights + gradients + optimizer state, at most")
    axes.margins(y=0.15)
    axes.legend()


def _draw_hooks(axes: Any, seconds: dict[str, dict[str, float]]) -> None:
    for (way, row), style in zip(seconds.items(), ("-", "--", ":"), strict=True):
        axes.loglog([int(size) for size in row], list(row.values()), style, marker="o", label=way)
    axes.set(xlabel="parameters", ylabel="seconds", title="backward and update of parameters of one entry")
    axes.legend()
