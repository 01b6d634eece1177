"""Compute a group's speed and cost from its counting runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Literal, TypeVar

from sparsebp_cli.compare.cost import compare_cost, find_limit, find_relative_cost, find_step_cost, sum_flops
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Busy, Cost, Layers, Speed
from sparsebp_cli.compare.saving import find_saving
from sparsebp_cli.compare.statistics import Difference, Quartiles, paired_ratio, spread
from sparsebp_cli.compare.whole import whole_median, whole_quartiles
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric

MOST_POINTS = 400  # of one curve; a screen shows fewer

Item = TypeVar("Item")


def measure_speed(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Speed:
    """Return a group's speed; ``baseline`` is empty for the baseline itself."""
    cost, saving = find_step_cost(runs), find_saving(runs)
    counted = None if cost is None else cost.counted
    return Speed(
        step=_times(runs, metric.STEP_SECONDS),
        forward=_times(runs, metric.FORWARD_SECONDS),
        backward=_times(runs, metric.BACKWARD_SECONDS),
        optimizer=_times(runs, metric.OPTIMIZER_SECONDS),
        tokens_per_second=_times(runs, metric.TOKENS_PER_SECOND),
        training_seconds=spread([run.training_seconds for run in runs if run.training_seconds]),
        step_ratio=_ratio(runs, baseline, lambda run: median_time(run, metric.STEP_SECONDS)),
        backward_ratio=_ratio(runs, baseline, lambda run: median_time(run, metric.BACKWARD_SECONDS)),
        limit=saving.limit,
        reached=saving.reached,
        reached_low=saving.reached_low,
        cost=compare_cost(runs, baseline or runs),
        flops=None if counted is None else fmean(sum_flops(run) or 0.0 for run in runs),
        step_cost=None if cost is None else cost.dense_steps,
        cost_by="" if cost is None else cost.by if counted is None else "steps",
        relative_cost=find_relative_cost(runs, baseline or runs),
        seconds_ratio=_ratio(runs, baseline, _spent_seconds),
        busy=find_busy(runs),
    )


def _spent_seconds(run: LoadedRun) -> float | None:
    """Return the CPU seconds (on CUDA the seconds) of all steps of a run that counted each step. Warm-up steps and
    untimed steps count as the mean of the others."""
    which = metric.STEP_SECONDS if run.series(metric.PEAK_ALLOCATED_BYTES.name) else metric.STEP_CPU_SECONDS
    values = run.values(which.name, after_warmup=True)
    return fmean(values) * run.steps if values and sum_flops(run) is not None else None


def measure_cost(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Cost:
    """Return a group's memory, FLOPs and gradient measurements; ``baseline`` is empty for the baseline itself."""
    device, process = _largest(runs, metric.PEAK_ALLOCATED_BYTES), _largest(runs, metric.PEAK_RESIDENT_BYTES)
    peak_of: Literal["device", "process", ""] = "device" if device else "process" if process else ""
    held = metric.PEAK_ALLOCATED_BYTES if device else metric.STEP_PEAK_BYTES
    reducers = {"largest": _largest, "median": _median}
    return Cost(
        held_bytes=_largest(runs, held),
        held_ratio=_ratio(runs, baseline, lambda run: _largest([run], held)),
        peak_bytes=device or process,
        peak_of=peak_of,
        claimed_flops=_claimed_flops(runs),
        **{f.name: reducers[f.metadata["how"]](runs, f.metadata["metric"]) for f in fields(Cost) if f.metadata},
    )


def by_seed(runs: Iterable[LoadedRun], of: Callable[[LoadedRun], float | None]) -> dict[int, float]:
    """Return seed to value, without runs that lack a seed or a value, because they cannot be paired."""
    return {run.seed: value for run in runs if (value := of(run)) is not None}


def median_time(run: LoadedRun, which: Metric) -> float | None:
    """Return one run's median time after warm-up; None if there is none."""
    return whole_median([(run, run.steady(which.name))])


def _ratio(
    runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], of: Callable[[LoadedRun], float | None]
) -> Difference | None:
    return paired_ratio(by_seed(runs, of), by_seed(baseline, of)) if baseline else None


def _claimed_flops(runs: Sequence[LoadedRun]) -> float | None:
    """Return the estimated FLOPs of the whole backward under the policy. A proof has estimated and counted
    fractions of one part of the backward; the size of that part follows from the saved work. If no work was saved, or
    without a proof, use the limit, (F + B) / (F + claimed); this assumes that the policy leaves the forward unchanged.
    """
    if (proven := whole_median((run, _proven_claims(run)) for run in runs)) is not None:
        return proven
    forward, dense = _median(runs, metric.FORWARD_FLOPS), _median(runs, metric.BACKWARD_DENSE)
    limit = find_limit(runs)
    if forward is None or dense is None or not limit:
        return None
    return (forward + dense) / limit - forward


def _proven_claims(run: LoadedRun) -> dict[int, float]:
    dense, executed, claimed, done = (
        run.series(which.name)
        for which in (metric.BACKWARD_DENSE, metric.BACKWARD_EXECUTED, metric.CLAIMED_SHARE, metric.EXECUTED_SHARE)
    )
    saving = [step for step in done if step in dense and step in executed and step in claimed and done[step] < 1.0]
    nothing = {step: dense[step] for step in claimed if claimed[step] == 1.0 and step in dense}
    found = {s: dense[s] - (1.0 - claimed[s]) * (dense[s] - executed[s]) / (1.0 - done[s]) for s in saving}
    return dict(sorted((nothing | found).items()))


def _times(runs: Iterable[LoadedRun], which: Metric) -> Quartiles | None:
    return whole_quartiles((run, run.steady(which.name)) for run in runs)


def _median(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    return whole_median((run, run.series(which.name)) for run in runs)


def _largest(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    return max((value for run in runs for value in run.values(which.name)), default=None)


def thin(points: Sequence[Item], most: int = MOST_POINTS) -> tuple[Item, ...]:
    """Return at most ``most`` points, in [20, 400], evenly spaced, including the first and the last."""
    most = max(20, min(most, MOST_POINTS))
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(i * (len(points) - 1) / (most - 1))] for i in range(most))


FIGURES = ("kept_share", "cosine", "relative_error", "sign_agreement")


def measure_layers(runs: Sequence[LoadedRun]) -> Layers:
    """Return each measurement by layer and step, as the mean over the runs that have it; empty if no run has any."""
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


LEAST_SHARE = 0.8  # of the expected CPU seconds; below it, other processes took a fifth of the time
MOST_LOAD = 1.5  # runnable threads per CPU; a run that uses all CPUs has 1


def find_busy(runs: Sequence[LoadedRun]) -> Busy | None:
    """Return how much the counting runs of a group were disturbed; None if none was, or none recorded it."""
    shares = {run.run_id: share for run in runs if (share := _cpu_share(run)) is not None}
    loads = {run.run_id: load for run in runs if (load := _load(run)) is not None}
    disturbed = [
        run for run in runs if shares.get(run.run_id, 1.0) < LEAST_SHARE or loads.get(run.run_id, 0.0) > MOST_LOAD
    ]
    if not disturbed:
        return None
    return Busy(len(disturbed), len(runs), min(shares.values(), default=None), max(loads.values(), default=None))


def _cpu_share(run: LoadedRun) -> float | None:
    """Return the median over steps of a step's CPU seconds over those of the run's undisturbed steps."""
    if str(run.history.facts.get("device", "cpu")).startswith("cuda"):
        return None
    wall, used = (run.steady(name.name) for name in (metric.STEP_SECONDS, metric.STEP_CPU_SECONDS))
    rates = [used[step] / wall[step] for step in used if wall.get(step, 0.0) > 0.0]
    if len(rates) < 2:
        return None
    # What this run can reach: the best tenth of its steps, at least one CPU second per second. See decision 22.
    best = statistics.quantiles(rates, n=10, method="inclusive")[-1]
    return statistics.median(rates) / max(1.0, best)


def _load(run: LoadedRun) -> float | None:
    values = run.values(metric.LOAD.name, after_warmup=True)
    return statistics.median(values) if values else None
