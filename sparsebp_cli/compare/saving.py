"""Compute what policies save against dense: one limit, one speed-up and one fraction reached, for every output.

The work is that of all steps, in counted FLOPs. Probes time dense and policy on a few batches, whose shape may be rare.
So a probe determines only the policy's time per FLOP, and which fraction of the counted FLOPs the policy declared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.compare.cost import count_probed, find_limit, probe_ratio, time_probes
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.whole import whole_median, whole_quartiles
from sparsebp_cli.run import metric

LEAST_LIMIT = 1.001  # with a smaller limit there is nothing to reach


@dataclass(frozen=True)
class Saving:
    """The saving in forward and backward, over all steps of all runs of a group.

    Args:
        limit: The largest speed-up, if time were proportional to the FLOPs that the policies declare; None if they
            declare nothing.
        speed: The speed-up by the time per FLOP in the probes; None without a timed probe.
        reached: Fraction of the time saving at the limit that was reached; None if nothing can be saved, or without a
            timed probe.
        reached_low: The same by the slower quartile of the probes.
        probes: Number of timed probes.
    """

    limit: float | None = None
    speed: float | None = None
    reached: float | None = None
    reached_low: float | None = None
    probes: int = 0


def find_saving(runs: Sequence[LoadedRun]) -> Saving:
    """Return what the runs of one recipe save. Older runs count only probed steps, so use these."""
    shares = [share for run in runs if (share := _count_all(run)) is not None]
    if not shares or len(shares) < len(runs):
        timed, limit = probe_ratio(runs), find_limit(runs)
        ratios = None if timed is None else (timed.median, timed.high)
        return _make(limit, ratios, 0 if timed is None else timed.n)
    work = statistics.fmean(shares)
    declared = whole_median((run, _declared(run)) for run in runs)
    seconds = whole_quartiles((run, _seconds_per_flop(run)) for run in runs)
    limit = 1.0 / (work * declared) if work and declared else None
    if seconds is None:
        return _make(limit, None, 0)
    return _make(limit, (work * seconds.median, work * seconds.high), seconds.n)


def _make(limit: float | None, ratios: tuple[float, float] | None, probes: int) -> Saving:
    if ratios is None:
        return Saving(limit)
    speed = 1.0 / ratios[0]
    if limit is None or limit < LEAST_LIMIT:
        return Saving(limit, speed, probes=probes)
    reached, reached_low = ((1.0 - ratio) / (1.0 - 1.0 / limit) for ratio in ratios)
    return Saving(limit, speed, reached, reached_low, probes)


def _count_all(run: LoadedRun) -> float | None:
    """Return the FLOPs of forward and backward of all steps, over those of dense steps on the same batches, without
    trial passes. Return None for older runs."""
    step, update, trials, dense, dense_update = (
        run.series(name.name)
        for name in (
            metric.STEP_FLOPS,
            metric.UPDATE_FLOPS,
            metric.PROBING_FLOPS,
            metric.DENSE_STEP_FLOPS,
            metric.DENSE_UPDATE_FLOPS,
        )
    )
    whole = sum(dense.values()) - sum(dense_update.values())
    if not step or whole <= 0.0:
        return None
    return (sum(step.values()) - (sum(update.values()) + sum(trials.values()))) / whole


def _declared(run: LoadedRun) -> dict[int, float]:
    """Return the FLOPs that the policies declare over those that a probe counted, by step."""
    counted, limits = count_probed(run), run.series(metric.LIMIT.name)
    return {step: 1.0 / limits[step] / counted[step] for step in limits if counted.get(step, 0.0) > 0.0}


def _seconds_per_flop(run: LoadedRun) -> dict[int, float]:
    """Return the policy's seconds per FLOP over dense's, by step of a probe."""
    counted = count_probed(run)
    return {step: ratio / counted[step] for step, ratio in time_probes(run).items() if counted.get(step, 0.0) > 0.0}
