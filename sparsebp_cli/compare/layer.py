"""Figures of the gradient by layer, from the journal's ``layers`` records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Layers

FIGURES = ("kept_share", "cosine", "relative_error", "sign_agreement")


def measure_layers(runs: Sequence[LoadedRun]) -> Layers:
    """Return each figure by layer and step, as the mean over the runs that have it; empty when no run recorded any."""
    records = [run.history.layers for run in runs if run.history.layers]
    steps = sorted({step for record in records for step in record})
    names = list(dict.fromkeys(name for record in records for step in sorted(record) for name in record[step]))
    found = {}
    for figure in FIGURES:
        rows = tuple(tuple(_mean(records, step, name, figure) for step in steps) for name in names)
        if any(cell is not None for row in rows for cell in row):
            found[figure] = rows
    return Layers(tuple(steps), tuple(names), found)


def _mean(
    records: Sequence[dict[int, dict[str, dict[str, float | None]]]], step: int, name: str, figure: str
) -> float | None:
    found = [record.get(step, {}).get(name, {}).get(figure) for record in records]
    numbers = [value for value in found if value is not None and math.isfinite(value)]
    return fmean(numbers) if numbers else None
