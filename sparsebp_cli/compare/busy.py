"""Whether a machine was busy while a run was timed: then its step times say more about the machine than the policy.

On a CPU, threads that compute run all the time: their CPU seconds over the wall seconds of a step stay near what they
are on a quiet machine, at least one second a second. What a run reaches in its best tenth of steps is its own quiet
expectation, for how well a policy's kernels use several threads is the policy's business. A machine that was busy from
the first step to the last may hide from that; the load average does not. On a GPU the host waits, so load alone tells.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Busy
from sparsebp_cli.run import metric

LEAST_SHARE = 0.8  # of the expected CPU seconds; under this a fifth of the time went to others
MOST_LOAD = 1.5  # threads that want to run, a CPU; a run that uses all CPUs makes 1


def find_busy(runs: Sequence[LoadedRun]) -> Busy | None:
    """Return whether runs were disturbed while they were timed.

    Args:
        runs: Of one group, that count.

    Returns:
        How much; None where no run was, or none recorded what would tell.
    """
    shares = {run.run_id: share for run in runs if (share := _cpu_share(run)) is not None}
    loads = {run.run_id: load for run in runs if (load := _load(run)) is not None}
    disturbed = [
        run for run in runs if shares.get(run.run_id, 1.0) < LEAST_SHARE or loads.get(run.run_id, 0.0) > MOST_LOAD
    ]
    if not disturbed:
        return None
    return Busy(len(disturbed), len(runs), min(shares.values(), default=None), max(loads.values(), default=None))


def _cpu_share(run: LoadedRun) -> float | None:
    """CPU seconds of a step over those that the run has when nothing disturbs it: the median over steps."""
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
