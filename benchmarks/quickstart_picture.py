"""Draw the README's picture from the comparison of the quickstart's runs.

    sparsebp compare quickstart-dense quickstart -o json | python benchmarks/quickstart_picture.py quickstart.svg

It shows the validation loss at equal steps and at equal cost, and the cost of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

COLOURS, MARKERS = ("#0072B2", "#D55E00"), ("o", "s")  # Okabe and Ito's: distinct to colour-blind readers
OPTIONS = {"font.size": 9, "svg.hashsalt": "sparsebp", "axes.spines.top": False, "axes.spines.right": False}


def draw(comparison: dict[str, Any], path: Path) -> None:
    """Draw three panels. Curves begin after the first step, since the loss before training is far above all others."""
    metric = comparison["course"]
    with mpl.rc_context(OPTIONS):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        steps, costs, bars = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
        for number, group in enumerate(comparison["groups"]):
            style = {"color": COLOURS[number], "marker": MARKERS[number], "label": group["label"]}
            cost = group["speed"]["relative_cost"]
            for run in (one for one in comparison["runs"] if one["label"] == group["label"]):
                points = [point for point in run["curves"][metric] if point[0] > 0]
                values = [point[3] for point in points]
                steps.plot([point[0] for point in points], values, **style)
                costs.plot([point[0] * cost for point in points], values, **style)
            bars.barh([number], [group["speed"]["cost"]["mean"]], color=COLOURS[number], height=0.55)
            bars.text(group["speed"]["cost"]["mean"], number, f" {group['speed']['cost']['mean']:.2f}", va="center")
        steps.set(xlabel="optimizer steps", ylabel=f"{metric}, lower is better", title="at equal steps")
        costs.set(xlabel="cost in dense steps", title="at equal cost")
        bars.set_yticks(range(len(comparison["groups"])), [group["label"] for group in comparison["groups"]])
        bars.invert_yaxis()
        bars.set(xlabel="FLOPs of all steps over dense", title="cost")
        for axes in (steps, costs):
            axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        figure.legend(*steps.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write")
    options = parser.parse_args()
    draw(json.load(sys.stdin), options.path)


if __name__ == "__main__":
    main()
