"""A group's figures, from the runs of it that count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from sparsebp_cli.compare.comparison import Cost, Quality, Speed
from sparsebp_cli.compare.load import LoadedRun
from sparsebp_cli.compare.statistics import Quartiles, paired_difference, quartiles, spread
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric

TIME_TOLERANCE = 1.05


def measure_quality(
    runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], name: str, equal_time: float | None
) -> Quality:
    """Return how good a group's models are.

    Args:
        runs: That count; all have a finite final value.
        baseline: The baseline's; empty for the baseline itself.
        name: Of the quality metric.
        equal_time: Seconds of training that every run has had.

    Returns:
        The figures.
    """
    here, there = ({run.seed: run.final(name) or 0.0 for run in some} for some in (runs, baseline))
    return Quality(
        final=spread(list(here.values())),
        difference=paired_difference(here, there),
        at_equal_time=spread(_at_time(runs, name, equal_time)),
    )


def measure_speed(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Speed:
    """Return how fast a group's steps are.

    Args:
        runs: That count.
        baseline: The baseline's; empty for the baseline itself.

    Returns:
        The figures.
    """
    step, dense = _times(runs, metric.STEP_SECONDS), _times(baseline, metric.STEP_SECONDS)
    here, there = ({run.seed: q.median for run in some if (q := step_time(run))} for some in (runs, baseline))
    ratios = [there[seed] / here[seed] for seed in here.keys() & there.keys()]
    return Speed(
        step=step,
        forward=_times(runs, metric.FORWARD_SECONDS),
        backward=_times(runs, metric.BACKWARD_SECONDS),
        optimizer=_times(runs, metric.OPTIMIZER_SECONDS),
        tokens_per_second=_times(runs, metric.TOKENS_PER_SECOND),
        speedup=dense.median / step.median if dense and step else None,
        speedup_low=min(ratios) if len(ratios) > 1 else None,
        speedup_high=max(ratios) if len(ratios) > 1 else None,
        ceiling=_median(runs, metric.CEILING),
        realised_share=quartiles(_all(runs, metric.REALISED_SHARE)),
    )


def measure_cost(runs: Sequence[LoadedRun]) -> Cost:
    """Return what a group's steps take beside time.

    Args:
        runs: That count.

    Returns:
        The figures.
    """
    device, process = _largest(runs, metric.PEAK_ALLOCATED_BYTES), _largest(runs, metric.PEAK_RESIDENT_BYTES)
    peak_of: Literal["device", "process", ""] = "device" if device else "process" if process else ""
    return Cost(
        peak_bytes=device or process,
        peak_of=peak_of,
        weight_bytes=_largest(runs, metric.WEIGHT_BYTES),
        gradient_bytes=_largest(runs, metric.GRADIENT_BYTES),
        optimizer_bytes=_largest(runs, metric.OPTIMIZER_BYTES),
        saved_bytes=_largest(runs, metric.SAVED_BYTES),
        executed_flops=_median(runs, metric.BACKWARD_EXECUTED),
        dense_flops=_median(runs, metric.BACKWARD_DENSE),
        claimed_flops=_claimed_flops(runs),
        kept_share=_median(runs, metric.KEPT_SHARE),
        cosine=_median(runs, metric.COSINE),
        relative_error=_median(runs, metric.RELATIVE_ERROR),
    )


def step_time(run: LoadedRun) -> Quartiles | None:
    """Return one run's step time after warm-up."""
    return quartiles(run.values(metric.STEP_SECONDS.name, after_warmup=True))


def training_seconds(run: LoadedRun) -> float:
    """Return how long a run's steps took together."""
    return math.fsum(run.values(metric.STEP_SECONDS.name))


def _claimed_flops(runs: Sequence[LoadedRun]) -> float | None:
    """The ceiling is (F + B) / (F + claimed): solved for what is claimed."""
    forward, dense = _median(runs, metric.FORWARD_FLOPS), _median(runs, metric.BACKWARD_DENSE)
    ceiling = _median(runs, metric.CEILING)
    if forward is None or dense is None or not ceiling:
        return None
    return (forward + dense) / ceiling - forward


def _at_time(runs: Iterable[LoadedRun], name: str, seconds: float | None) -> list[float]:
    """The last value inside the time, never one in between: nothing was measured there.

    Runs of equal work differ by a few percent in time; without a tolerance the slower would lose its last evaluation.
    """
    if seconds is None:
        return []
    curves = [[value for _, at, value in run.curve(name) if at <= seconds * TIME_TOLERANCE] for run in runs]
    return [values[-1] for values in curves if values]


def _all(runs: Iterable[LoadedRun], which: Metric, *, after_warmup: bool = False) -> list[float]:
    return [value for run in runs for value in run.values(which.name, after_warmup=after_warmup)]


def _times(runs: Iterable[LoadedRun], which: Metric) -> Quartiles | None:
    return quartiles(_all(runs, which, after_warmup=True))


def _median(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    values = _all(runs, which)
    return statistics.median(values) if values else None


def _largest(runs: Iterable[LoadedRun], which: Metric) -> float | None:
    return max(_all(runs, which), default=None)
