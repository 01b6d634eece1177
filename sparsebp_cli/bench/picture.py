"""A benchmark as a picture: the speed-up of each form at each share kept, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.bench.result import Benchmark, BenchmarkRow
from sparsebp_cli.compare.picture import COLOURS, MARKERS, grid_lines
from sparsebp_cli.run.picture import OPTIONS, check_path, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = (5.2, 4.6)  # inches
KEEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
SPEEDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)


def draw(benchmark: Benchmark, path: Path) -> Path:
    """Draw speed-up against the share kept, one panel a kind of site, with dashed limits; return the path. Forms
    without an option ``keep`` are left out. Raises ``UsageError`` unless the path ends in ``.png``, ``.svg`` or
    ``.pdf`` and its folder exists."""
    check_path(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    forms = list(dict.fromkeys((row.site, row.label) for row in benchmark.rows if row.keep is not None))
    sites = list(dict.fromkeys(site for site, _ in forms)) or [""]
    with mpl.rc_context(OPTIONS):
        figure = Figure(figsize=(PANEL[0] * len(sites), PANEL[1]), layout="constrained")
        panels = figure.subplots(1, len(sites), sharey=True, squeeze=False)[0]
        for axes, site in zip(panels, sites, strict=True):
            for number, (_, label) in enumerate(form for form in forms if form[0] == site):
                rows = [row for row in benchmark.rows if (row.site, row.label) == (site, label)]
                _draw_form(axes, sorted(rows, key=lambda row: row.keep or 0.0), number)
            _draw_dense(axes, site)
            handles, _ = axes.get_legend_handles_labels()
            handles.append(Line2D([], [], color="#555555", linestyle="--", linewidth=1.0, label="limit"))
            below = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.13), "ncols": 3, "frameon": False}
            axes.legend(handles=handles, fontsize=8, **below)
        panels[0].set_ylabel("speed-up over plain PyTorch")
        figure.suptitle(_title(benchmark), fontsize=10, x=0.01, ha="left")
        return save(figure, path)


def _draw_form(axes: Axes, rows: Sequence[BenchmarkRow], number: int) -> None:
    keeps = [row.keep or 0.0 for row in rows]
    speed, colour = [row.speedup for row in rows], COLOURS[number % len(COLOURS)]
    low = [max(0.0, s - 1.0 / row.ratio.high) for s, row in zip(speed, rows, strict=True)]
    high = [max(0.0, 1.0 / row.ratio.low - s) for s, row in zip(speed, rows, strict=True)]
    marker = MARKERS[number % len(MARKERS)]
    axes.errorbar(keeps, speed, [low, high], color=colour, marker=marker, markersize=5, capsize=2, label=rows[0].label)
    ceilings = [(row.keep or 0.0, row.ceiling) for row in rows if row.ceiling is not None and row.ceiling > 1.0]
    if ceilings:
        x, y = zip(*ceilings, strict=True)
        axes.plot(
            x, y, color=colour, linestyle="--", linewidth=1.0, marker=marker, markersize=3, markerfacecolor="none"
        )


def _draw_dense(axes: Axes, site: str) -> None:
    from matplotlib.ticker import FixedLocator

    axes.axhline(1.0, color="#000000", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, ticks in ((axes.xaxis, KEEPS), (axes.yaxis, SPEEDS)):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
    axes.set_xlabel("share kept")
    axes.set_title(f"at {site}" if site else "", loc="left", fontsize=9)
    grid_lines(axes)


def _title(benchmark: Benchmark) -> str:
    model, request = benchmark.model, benchmark.request
    place = model["device"] if model["device"] != "cpu" else _threads(benchmark.machine["threads"])
    name = request.model.name or (request.model.config or {}).get("model_type", "")
    size = f"{model['parameters'] / 1e6:.3g}M parameters, {model['dtype']}"
    return f"{request.policy} on {name} ({size}), {request.batch} x {request.length} tokens, {place}"


def _threads(number: int) -> str:
    return "one CPU thread" if number == 1 else f"{number} CPU threads"
