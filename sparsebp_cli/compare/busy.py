"""Whether a machine was busy while a run was timed, so that step times describe the machine rather than the policy.

On a CPU, computing threads run all the time: their CPU seconds over the wall seconds of a step stay near the value of a
quiet machine, at least 1. That value is taken from the run's own best tenth of steps, because how well kernels use
several threads depends on the policy. A machine that was busy from the first step to the last can hide from this
measure, but not from the load average. On a GPU the host waits, so only the load average counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Busy
from sparsebp_cli.run import metric

LEAST_SHARE = 0.8  # of the expected CPU seconds; below it, other processes took a fifth of the time
MOST_LOAD = 1.5  # runnable threads a CPU; a run that uses all CPUs makes 1


def find_busy(runs: Sequence[LoadedRun]) -> Busy | None:
    """Return how much the counting runs of a group were disturbed; None where none was, or none recorded it."""
    shares = {run.run_id: share for run in runs if (share := _cpu_share(run)) is not None}
    loads = {run.run_id: load for run in runs if (load := _load(run)) is not None}
    disturbed = [
        run for run in runs if shares.get(run.run_id, 1.0) < LEAST_SHARE or loads.get(run.run_id, 0.0) > MOST_LOAD
    ]
    if not disturbed:
        return None
    return Busy(len(disturbed), len(runs), min(shares.values(), default=None), max(loads.values(), default=None))


def _cpu_share(run: LoadedRun) -> float | None:
    """Median over steps of the CPU seconds of a step over those of the run's undisturbed steps."""
    if str(run.history.facts.get("device", "cpu")).startswith("cuda"):
        return None
    wall, used = (run.steady(name.name) for name in (metric.STEP_SECONDS, metric.STEP_CPU_SECONDS))
    rates = [used[step] / wall[step] for step in used if wall.get(step, 0.0) > 0.0]
    if len(rates) < 2:
        return None
    best = statistics.quantiles(rates, n=10, method="inclusive")[-1]
    return statistics.median(rates) / max(1.0, best)


def _load(run: LoadedRun) -> float | None:
    values = run.values(metric.LOAD.name, after_warmup=True)
    return statistics.median(values) if values else None
