"""Compute a number for a whole training from measurements at single steps.

Without a schedule this is the median over all of them, with quartiles. With a schedule, each phase has its own median,
and the result is their mean weighted with the phases' steps, because probes may be rare in a long phase.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import Quartiles, quartiles
from sparsebp_cli.run.policy_phase import PolicyPhase, split_series, weigh
from sparsebp_cli.run.series import select

Measured = tuple[LoadedRun, Mapping[int, float]]  # a run, and ascending optimizer step to value


def whole_quartiles(measured: Iterable[Measured]) -> Quartiles | None:
    """Return median and quartiles over all runs of one recipe; None without values."""
    by_phase, phases = split_runs(measured)
    found = {number: q for number, values in by_phase.items() if (q := quartiles(values)) is not None}
    if len(found) < 2:
        return next(iter(found.values()), None)
    low, middle, high = (
        weigh({number: getattr(q, part) for number, q in found.items()}, phases) for part in ("low", "median", "high")
    )
    return Quartiles(middle, low, high, sum(q.n for q in found.values()))


def whole_median(measured: Iterable[Measured], *, is_speedup: bool = False) -> float | None:
    """Return the median over all runs of one recipe; None without values. For ``is_speedup`` see
    :func:`~sparsebp_cli.run.policy_phase.weigh`."""
    by_phase, phases = split_runs(measured)
    found = {number: statistics.median(values) for number, values in by_phase.items()}
    return weigh(found, phases, is_speedup=is_speedup) if found else None


def split_runs(measured: Iterable[Measured]) -> tuple[dict[int, array[float]], list[PolicyPhase[dict[str, Any]]]]:
    """Return the finite values of all runs by phase, and the phases of the run that came furthest."""
    by_phase: dict[int, array[float]] = {}
    phases: list[PolicyPhase[dict[str, Any]]] = []
    for run, series in measured:
        finite = select(series, lambda _, value: math.isfinite(value))
        phases = max(phases, run.phases, key=lambda some: some[-1].end if some else 0)
        for number, values in split_series(finite, run.phases).items():
            by_phase.setdefault(number, array("d")).extend(values)
    return {number: values for number, values in by_phase.items() if values}, phases
