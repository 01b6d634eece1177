"""Computes a group's speed and cost from its counting runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from sparsebp_cli.compare.busy import find_busy
from sparsebp_cli.compare.cost import find_step_cost, probe_ratio
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Choice, Cost, Speed
from sparsebp_cli.compare.memory import find_step_peak
from sparsebp_cli.compare.statistics import Difference, Quartiles, paired_ratio, quartiles, spread
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric


def measure_speed(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Speed:
    """Return a group's speed; ``baseline`` is empty for the baseline itself."""
    cost = find_step_cost(runs)
    return Speed(
        step=_times(runs, metric.STEP_SECONDS),
        forward=_times(runs, metric.FORWARD_SECONDS),
        backward=_times(runs, metric.BACKWARD_SECONDS),
        optimizer=_times(runs, metric.OPTIMIZER_SECONDS),
        tokens_per_second=_times(runs, metric.TOKENS_PER_SECOND),
        training_seconds=spread([run.training_seconds for run in runs if run.training_seconds]),
        step_ratio=_ratio(runs, baseline, lambda run: median_time(run, metric.STEP_SECONDS)),
        backward_ratio=_ratio(runs, baseline, lambda run: median_time(run, metric.BACKWARD_SECONDS)),
        ceiling=_median(runs, metric.CEILING),
        realised_share=quartiles(_all(runs, metric.REALISED_SHARE)),
        probe_ratio=probe_ratio(runs),
        step_cost=None if cost is None else cost.spread,
        cost_by="" if cost is None else cost.by,
        busy=find_busy(runs),
    )


def measure_cost(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Cost:
    """Return a group's memory, FLOPs and gradient figures; ``baseline`` is empty for the baseline itself."""
    device, process = _largest(runs, metric.PEAK_ALLOCATED_BYTES), _largest(runs, metric.PEAK_RESIDENT_BYTES)
    peak_of: Literal["device", "process", ""] = "device" if device else "process" if process else ""
    peak = metric.PEAK_ALLOCATED_BYTES if device else metric.PEAK_RESIDENT_BYTES
    return Cost(
        peak_bytes=device or process,
        peak_of=peak_of,
        peak_ratio=_ratio(runs, baseline, lambda run: _largest([run], peak)),
        weight_bytes=_largest(runs, metric.WEIGHT_BYTES),
        gradient_bytes=_largest(runs, metric.GRADIENT_BYTES),
        optimizer_bytes=_largest(runs, metric.OPTIMIZER_BYTES),
        saved_bytes=_largest(runs, metric.SAVED_BYTES),
        step_peak=find_step_peak(runs),
        executed_flops=_median(runs, metric.BACKWARD_EXECUTED),
        dense_flops=_median(runs, metric.BACKWARD_DENSE),
        claimed_flops=_claimed_flops(runs),
        kept_share=_median(runs, metric.KEPT_SHARE),
        cosine=_median(runs, metric.COSINE),
        relative_error=_median(runs, metric.RELATIVE_ERROR),
        independent_cosine=_median(runs, metric.INDEPENDENT_COSINE),
        dense_independent_cosine=_median(runs, metric.DENSE_INDEPENDENT_COSINE),
        choice=_choice(runs),
    )


def by_seed(runs: Iterable[LoadedRun], of: Callable[[LoadedRun], float | None]) -> dict[int, float]:
    """Return seed to value; runs without a seed or a value cannot be paired and are left out."""
    return {run.seed: value for run in runs if run.seed is not None and (value := of(run)) is not None}


def median_time(run: LoadedRun, which: Metric) -> float | None:
    """Return one run's median time after warm-up; None when there is none."""
    found = quartiles(run.values(which.name, after_warmup=True))
    return found.median if found else None


def _ratio(
    runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], of: Callable[[LoadedRun], float | None]
) -> Difference | None:
    return paired_ratio(by_seed(runs, of), by_seed(baseline, of)) if baseline else None


def _choice(runs: Sequence[LoadedRun]) -> Choice | None:
    ratio = _median(runs, metric.CHOICE_COST)
    if ratio is None:
        return None
    return Choice(
        cost_ratio=ratio,
        share=_median(runs, metric.CHOICE_SHARE),
        unit_worth=_median(runs, metric.CHOICE_WORTH),
        target_ess=_median(runs, metric.TARGET_ESS),
        example_ess=_median(runs, metric.EXAMPLE_ESS),
        row_ess=_median(runs, metric.ROW_ESS),
    )


def _claimed_flops(runs: Sequence[LoadedRun]) -> float | None:
    """The FLOPs that the policy claims to leave of the whole backward.

    A proof has the claimed and executed shares of the same part of the backward; the size of that part follows from the
    work that was saved. Where none was saved, or without a proof, it follows from the ceiling, (F + B) / (F + claimed),
    if the policy leaves the forward alone.
    """
    if proven := [claim for run in runs for claim in _proven_claims(run)]:
        return statistics.median(proven)
    forward, dense = _median(runs, metric.FORWARD_FLOPS), _median(runs, metric.BACKWARD_DENSE)
    ceiling = _median(runs, metric.CEILING)
    if forward is None or dense is None or not ceiling:
        return None
    return (forward + dense) / ceiling - forward


def _proven_claims(run: LoadedRun) -> list[float]:
    dense, executed, claimed, done = (
        run.series(which.name)
        for which in (metric.BACKWARD_DENSE, metric.BACKWARD_EXECUTED, metric.CLAIMED_SHARE, metric.EXECUTED_SHARE)
    )
    saving = [step for step in done if step in dense and step in executed and step in claimed and done[step] < 1.0]
    return [dense[s] - (1.0 - claimed[s]) * (dense[s] - executed[s]) / (1.0 - done[s]) for s in saving]


def _all(runs: Iterable[LoadedRun], which: Metric, *, after_warmup: bool = False) -> list[float]:
    return [value for run in runs for value in run.values(which.name, after_warmup=after_warmup)]


def _times(runs: Iterable[LoadedRun], which: Metric) -> Quartiles | None:
    return quartiles(_all(runs, which, after_warmup=True))


def _median(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    values = _all(runs, which)
    return statistics.median(values) if values else None


def _largest(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    return max(_all(runs, which), default=None)
