"""The picture of one run on MLflow's pages: losses, step times, and the kept share of its gradients."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from sparsebp_cli.run import History, metric
from sparsebp_cli.run.metric import Metric
from sparsebp_cli.run.picture import OPTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "pictures/run.svg"
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito's, distinct to colour-blind readers

Line = tuple[Metric, str, str, float]
LOSS: tuple[Line, ...] = (
    (metric.TRAIN_LOSS, "training", BLUE, 1.0),
    (metric.EVAL_LOSS, "held out", ORANGE, 1.0),
)
TIME: tuple[Line, ...] = (
    (metric.STEP_SECONDS, "step", BLUE, 1000.0),
    (metric.BACKWARD_SECONDS, "backward", ORANGE, 1000.0),
    (metric.FORWARD_SECONDS, "forward", GREEN, 1000.0),
)
GRADIENT: tuple[Line, ...] = (
    (metric.KEPT_SHARE, "kept share", BLUE, 1.0),
    (metric.COSINE, "cosine to dense", ORANGE, 1.0),
)


def draw_run(history: History, title: str) -> str:
    """Return the run's picture as SVG; empty when nothing was measured."""
    if not any(history.metrics.values()):
        return ""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(OPTIONS):
        figure = Figure(figsize=(11, 3.2), layout="constrained")
        figure.suptitle(title, fontsize=10)
        loss, time, gradient = figure.subplots(1, 3)
        _draw(loss, history, LOSS, "loss, nats a token")
        _draw(time, history, TIME, "milliseconds")
        _draw(gradient, history, GRADIENT, "of the gradient")
        gradient.set_ylim(-0.05, 1.05)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw(axes: Axes, history: History, lines: tuple[Line, ...], label: str) -> None:
    for which, word, colour, scale in lines:
        points = [(step, scale * value) for step, value in history.series(which.name).items() if math.isfinite(value)]
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) < 30 else None
            axes.plot(steps, values, color=colour, label=word, linewidth=1.3, marker=marker, markersize=3)
    axes.set(xlabel="optimizer steps", ylabel=label)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
