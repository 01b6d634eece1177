"""The metrics' reference, from the table of metrics."""

from __future__ import annotations

from pathlib import Path

from generator.markdown import code, head, table
from sparsebp_cli.run.metric import METRICS

TEXT = """This page defines every number that a run logs over steps, in the event log and in MLflow. [Details of
metrics](definitions.md) says more about some. *Timing*: the value depends on the machine's speed, so repeating the run
gives another one; all others are repeated bit for bit on one machine with one thread count (CPU). *Needs*: what a run
on a CPU needs to log it, beyond a gradient policy and probes."""


def page(root: Path) -> str:  # noqa: ARG001 - the signature of every page
    """Return the page."""
    rows = [
        (code(one.name), one.unit, one.better, "yes" if one.timing else "", one.about, one.when)
        for one in METRICS.values()
    ]
    columns = ("metric", "unit", "better", "timing", "definition", "needs")
    return "\n".join([head("Metrics", TEXT), table(columns, rows)])
