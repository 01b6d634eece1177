"""Compute what policies save against dense: one limit, one speed-up and one fraction reached, for every output.

The work is that of all steps, in counted FLOPs. Probes time dense and policy on a few batches, whose shape may be rare.
So a probe determines only the policy's time per FLOP, and which fraction of the counted FLOPs the policy declared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsebp_cli.compare.cost import count_probed, find_limit, probe_ratio, time_probes
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import quartiles
from sparsebp_cli.compare.whole import split_runs
from sparsebp_cli.run import metric
from sparsebp_cli.run.policy_phase import split_series

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
    shares = [_count_all(run) for run in runs]
    if not all(shares):
        timed, limit = probe_ratio(runs), find_limit(runs)
        ratios = None if timed is None else (timed.median, timed.high)
        return _make(limit, ratios, 0 if timed is None else timed.n)
    work = {phase: statistics.fmean(share.get(phase, 0.0) for share in shares) for phase in set().union(*shares)}
    declared, _ = split_runs((run, _declared(run)) for run in runs)
    seconds, _ = split_runs((run, _seconds_per_flop(run)) for run in runs)
    least = sum(part * (statistics.median(declared[n]) if n in declared else 1.0) for n, part in work.items())
    found = {n: quartiles(values) for n, values in seconds.items()}
    middle = sum(part * (q.median if (q := found.get(n)) else 1.0) for n, part in work.items())
    high = sum(part * (q.high if (q := found.get(n)) else 1.0) for n, part in work.items())
    return _make(
        1.0 / least if declared and least else None,
        (middle, high) if found else None,
        sum(q.n for q in found.values() if q is not None),
    )


def _make(limit: float | None, ratios: tuple[float, float] | None, probes: int) -> Saving:
    if ratios is None:
        return Saving(limit)
    speed = 1.0 / ratios[0]
    if limit is None or limit < LEAST_LIMIT:
        return Saving(limit, speed, probes=probes)
    reached, reached_low = ((1.0 - ratio) / (1.0 - 1.0 / limit) for ratio in ratios)
    return Saving(limit, speed, reached, reached_low, probes)


def _count_all(run: LoadedRun) -> dict[int, float]:
    """Return the FLOPs of forward and backward of all steps by phase, over those of dense steps on the same batches,
    without trial passes. Return an empty mapping for older runs."""
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
        return {}
    others = [_by_phase(run, series) for series in (update, trials)]
    return {
        phase: (flops - sum(other.get(phase, 0.0) for other in others)) / whole
        for phase, flops in _by_phase(run, step).items()
    }


def _by_phase(run: LoadedRun, series: Mapping[int, float]) -> dict[int, float]:
    return {phase: sum(values) for phase, values in split_series(series, run.phases).items()}


def _declared(run: LoadedRun) -> dict[int, float]:
    """Return the FLOPs that the policies declare over those that a probe counted, by step."""
    counted, limits = count_probed(run), run.series(metric.LIMIT.name)
    return {step: 1.0 / limits[step] / counted[step] for step in limits if counted.get(step, 0.0) > 0.0}


def _seconds_per_flop(run: LoadedRun) -> dict[int, float]:
    """Return the policy's seconds per FLOP over dense's, by step of a probe."""
    counted = count_probed(run)
    return {step: ratio / counted[step] for step, ratio in time_probes(run).items() if counted.get(step, 0.0) > 0.0}
