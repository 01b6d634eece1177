"""Thin journals of tuning: what choices and budgets follow from, an eighth of the bytes.

A study has ten times as many tuning runs as runs of its report, and most of a journal is what single steps took. Of
these runs nobody asks for it: their evaluations decide, and the price of their steps is held against the budget.
"""

from __future__ import annotations

import json

from sparsebp_cli.run.metric import DENSE_STEP_FLOPS, DENSE_UPDATE_FLOPS, STEP_FLOPS, UPDATE_FLOPS

PRICES = {metric.name for metric in (STEP_FLOPS, DENSE_STEP_FLOPS, UPDATE_FLOPS, DENSE_UPDATE_FLOPS)}
# How names of what single steps measure begin. Any other name stays: a metric of a package may be the one that decides.
STEPS = (
    *("train/", "time/", "throughput/", "host/", "memory/", "policy/"),
    *("flops/", "proof/", "probe/", "speed/", "fidelity/"),
)
OF_STEPS = {"layers", "proof", "memory", "examples", "samples"}  # kinds of records that measure single steps
NOTE = "what single steps took and measured was left out of this archive (--thin), other than their FLOPs"
DIGITS = 3  # of the seconds at which something was written


def thin_journal(journal: bytes) -> bytes:
    """Return a journal without what single steps took and measured, other than their price, and with a note that says
    so. Lines that cannot be read stay as they are, and a thin journal is returned as it is."""
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
