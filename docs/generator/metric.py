"""The metrics' reference, from the table of metrics."""

from __future__ import annotations

from pathlib import Path

from generator.markdown import code, head, table
from sparsebp_cli.run.metric import METRICS

TEXT = """This page lists every number that a run logs over steps, in the journal and in MLflow. [Definitions
of metrics](definitions.md) defines them. *Timing*: the value depends on the machine's speed, so repeating the run
gives another one; all others are repeated bit for bit on one machine with one thread count (CPU)."""


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    rows = [
        (code(metric.name), metric.unit, metric.better, "yes" if metric.timing else "") for metric in METRICS.values()
    ]
    return "\n".join([head("Metrics", TEXT), table(("metric", "unit", "better", "timing"), rows)])
