"""Compute a number for a whole training from measurements at single steps: their median, with quartiles."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import Quartiles, quartiles

Measured = tuple[LoadedRun, Mapping[int, float]]  # a run, and ascending optimizer step to value


def whole_quartiles(measured: Iterable[Measured]) -> Quartiles | None:
    """Return median and quartiles over all runs of one recipe; None without values."""
    return quartiles(_pool(measured))


def whole_median(measured: Iterable[Measured]) -> float | None:
    """Return the median over all runs of one recipe; None without values."""
    values = _pool(measured)
    return statistics.median(values) if values else None


def _pool(measured: Iterable[Measured]) -> array[float]:
    """Return the finite values of all runs, without runs whose policies changed: a median of their steps would tell of
    one phase."""
    kept = (series.values() for run, series in measured if not run.has_phases)
    return array("d", (value for values in kept for value in values if math.isfinite(value)))
