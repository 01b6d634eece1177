"""Make thin event logs of tuning runs, with what choices and budgets need, in an eighth of the bytes.

A study has ten times as many tuning runs as report runs, and most of an event log are measurements of single steps.
Only the evaluations of tuning runs decide, and the cost of their steps is checked against the budget.
"""

from __future__ import annotations

import json

from sparsebp_cli.run.metric import DENSE_STEP_FLOPS, DENSE_UPDATE_FLOPS, STEP_FLOPS, UPDATE_FLOPS

PRICES = {metric.name for metric in (STEP_FLOPS, DENSE_STEP_FLOPS, UPDATE_FLOPS, DENSE_UPDATE_FLOPS)}
# Prefixes of measurements of single steps. Other names stay: a package's metric may be the deciding one.
STEPS = (
    *("train/", "time/", "throughput/", "host/", "memory/", "policy/"),
    *("flops/", "proof/", "probe/", "speed/", "fidelity/"),
)
OF_STEPS = {"layers", "proof", "memory", "examples", "samples"}  # record kinds that measure single steps
NOTE = "this archive (--thin) leaves out the times and measurements of single steps, except their FLOPs"
DIGITS = 3  # digits of the seconds at which something was written


def thin_journal(journal: bytes) -> bytes:
    """Return an event log without measurements of single steps, except their cost, and with a note about it. Unreadable
    lines stay unchanged, and so does a thin log."""
    return b"".join(filter(None, map(_thin_line, journal.splitlines(keepends=True))))


def _thin_line(line: bytes) -> bytes:
    try:
        record = json.loads(line)
        kind = record["kind"]
        if kind in OF_STEPS or (kind == "note" and record["text"] == NOTE):
            return b""
        if kind == "attempt" and record["attempt"] == 1:
            common = {"attempt": 1, "time": record["time"]}
            return line + json.dumps({"kind": "note"} | common | {"level": "info", "text": NOTE}).encode() + b"\n"
        if kind != "metrics":
            return line
        values = record["values"].items()
        kept = {name: value for name, value in values if name in PRICES or not name.startswith(STEPS)}
        if not kept:
            return b""
        return json.dumps(record | {"time": round(record["time"], DIGITS), "values": kept}).encode() + b"\n"
    except (ValueError, LookupError, TypeError, AttributeError):
        return line
