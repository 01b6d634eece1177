"""Compute the cost of a run, so that dense can be given as much and not less.

Runs record the FLOPs of each step: forward, backward, update and trial passes (:mod:`sparsebp_cli.worker.price`). A
run's cost is their sum, so it reflects a smaller batch, model or update. Seconds are shown too but decide nothing,
because they depend on one machine and one implementation.

Older runs did not count each step. Their cost is a ratio on the same batch: ``B P + u`` a step, in units of dense
forward and backward of one example. B is the number of examples a step, P the time of forward and backward with the
policy over dense's, and u the update. A dense step of b examples costs ``b + u``, and a run its steps times that.
P is the median over all probes of all seeds. In a probe, dense and policy alternate on one batch, so a busy machine
slows down both. Without probes, counted FLOPs are used. The FLOPs of trial passes before a step, over those of a dense
step, are added and spread over all steps. Work that was counted as equal to dense costs as much as dense: if two clocks
disagree about equal work, they measured the machine. u is the time of the update over that of forward and backward in
the same steps. Seconds of different runs are never compared. Such a ratio ignores what changes the batch itself, such
as ``training.group_by``. So older runs that differ in it are never controls of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import Difference, Quartiles, paired_ratio
from sparsebp_cli.compare.whole import whole_median, whole_quartiles
from sparsebp_cli.run import metric

MOST_OVER = 0.02  # a control may cost this fraction more than the policy, but not less
SAVES = 0.98  # above this fraction of a dense step's cost, a policy saves nothing that dense could use
EQUAL_WORK = 1e-3  # a smaller relative difference in FLOPs is the same work


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of an optimizer step, on average over all steps of all runs of a group."""

    flops: float  # forward, backward, update and trial passes
    dense_flops: float  # of a dense step over the same batches
    dense_update: float  # the part of dense_flops for updating all parameters that dense trains

    @property
    def dense_steps(self) -> float:
        """The FLOPs as a multiple of those of a dense step over the same batches."""
        return self.flops / self.dense_flops

    @property
    def same_passes(self) -> float:
        """The fraction of the batch with which a dense step costs as much, including its update."""
        return (self.flops - self.dense_update) / (self.dense_flops - self.dense_update)


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step."""

    ratio: Quartiles  # forward and backward, as a multiple of dense on the same batch: median and quartiles over probes
    # source of the ratio: ``probe`` (timed alternately with dense), ``flops`` (counted), or ``dense`` (the same work)
    by: Literal["probe", "flops", "dense"]
    update: float  # the update, in units of dense forward and backward of one example
    examples: int  # number of examples a step
    counted: StepFlops | None = None  # over all steps; None for older runs

    @property
    def units(self) -> float:
        """The cost in units of dense forward and backward of one example."""
        return self.examples * self.ratio.median + self.update

    @property
    def dense_steps(self) -> float:
        """The cost as a multiple of a dense step on the same batches."""
        if self.counted is not None:
            return self.counted.dense_steps
        return self.units / (self.examples + self.update)

    def relative(self, steps: int, examples: int, num_steps: int, ratio: float = 1.0) -> float:
        """Return the cost of another run as a multiple of this policy's over ``steps``; 1.0 is equal cost. The other
        run has ``num_steps`` steps of ``examples`` each, whose forward and backward cost ``ratio`` of dense."""
        return num_steps * (examples * ratio + self.update) / (steps * self.units)


def find_step_cost(runs: Sequence[LoadedRun]) -> StepCost | None:
    """Return the step cost of a group's finished runs; None without probes and counts."""
    if not runs:
        return None
    if (found := _ratio(runs)) is None:
        return None
    (ratio, by), examples = found, count_examples(runs[-1])
    updates = [share for run in runs if (share := _update_share(run)) is not None]
    update = examples * ratio.median * (median(updates) if updates else 0.0)
    return StepCost(ratio, by, update, examples, find_step_flops(runs))


def find_step_flops(runs: Sequence[LoadedRun]) -> StepFlops | None:
    """Return the FLOPs of a step of a group's runs; None if a run did not count them."""
    names = (metric.STEP_FLOPS, metric.DENSE_STEP_FLOPS, metric.DENSE_UPDATE_FLOPS)
    found = [[run.values(name.name) for name in names] for run in runs]
    if not found or not all(all(values) for values in found):
        return None
    return StepFlops(*(fmean(fmean(values) for values in some) for some in zip(*found, strict=True)))


def sum_flops(run: LoadedRun) -> float | None:
    """Return the FLOPs of all steps of a run; None if it did not count them."""
    return sum(run.series(metric.STEP_FLOPS.name).values()) or None


def count_work(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> tuple[float, float, float] | None:
    """Return the cost of a step of each group, and of a dense step of the first, in one unit: FLOPs including the
    update, or for older runs the ratio on the same batch. Return None if no unit fits both."""
    if not runs or not others:
        return None
    mine, theirs = find_step_flops(runs), find_step_flops(others)
    if mine is not None and theirs is not None:
        return mine.flops, theirs.flops, mine.dense_flops
    models = [
        {key: value for key, value in some[-1].flat.items() if key.startswith("model.")} for some in (runs, others)
    ]
    here, there = find_step_cost(runs), find_step_cost(others)
    if here is None or there is None or models[0] != models[1]:
        return None
    update = here.update if there.by == "dense" else there.update
    both = [cost.examples * cost.ratio.median + update for cost in (here, there)]
    return both[0], both[1], here.examples + update


def find_relative_cost(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> float | None:
    """Return the cost of a group's step in dense steps of the baseline's batch; None if unknown."""
    found = count_work(baseline, runs)
    return None if found is None else found[1] / found[2]


def compare_cost(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> Difference | None:
    """Return the FLOPs of all steps of a group's runs over the baseline's, paired by seed. For older runs return the
    ratio of step costs in the probes, without an interval. Return None if unknown."""
    there, here = ({run.seed: cost for run in some if (cost := sum_flops(run))} for some in (baseline, runs))
    if here and there:
        return paired_ratio(here, there)
    if (found := count_work(baseline, runs)) is None:
        return None
    steps = [max(run.steps_to_end for run in some) for some in (runs, baseline)]
    return Difference(found[1] * steps[0] / (found[0] * steps[1])) if all(steps) and found[0] else None


def count_examples(run: LoadedRun) -> int:
    """Return the number of examples a step of a run."""
    size = int(run.flat["training.per_device_train_batch_size"])
    parts = (run.flat.get("training.gradient_accumulation_steps"), run.flat.get("target.processes"))
    return size * math.prod(int(part) for part in parts if isinstance(part, int))


def is_near(cost: float, one_less: float) -> bool:
    """Return whether a control costs at least as much as the policy, and hardly more. ``cost`` is the control's, as a
    multiple of the policy's; ``one_less`` is its cost with one step, or one example a step, less. Steps and examples
    are whole numbers: if there are few, the next larger number is near at any distance."""
    return cost >= 1.0 - 1e-9 and (cost <= 1.0 + MOST_OVER or one_less < 1.0 - 1e-9)


def whole(needed: float) -> int:
    """Return the steps or examples of a control: 1 % more than needed, within the limit of :func:`is_near`."""
    most = max(math.ceil(needed - 1e-9), math.floor(needed * (1.0 + MOST_OVER)))
    return max(1, min(math.ceil(needed * (1.0 + MOST_OVER / 2)), most))


def _ratio(runs: Sequence[LoadedRun]) -> tuple[Quartiles, Literal["probe", "flops", "dense"]] | None:
    counted = whole_quartiles((run, count_probed(run)) for run in runs)
    if runs[-1].exact and counted is not None and abs(counted.median - 1.0) < EQUAL_WORK:
        return Quartiles(1.0, 1.0, 1.0, counted.n), "dense"
    trials = _trial_share(runs)
    if (timed := probe_ratio(runs)) is not None:
        return timed.shift(trials), "probe"
    return None if counted is None else (counted.shift(trials), "flops")


def _trial_share(runs: Sequence[LoadedRun]) -> float:
    """Return the FLOPs of trial passes per step, over those of a dense step; 0 without such passes."""
    shares = []
    for run in runs:
        trials, steps = run.series(metric.PROBING_FLOPS.name), run.series(metric.TRAIN_LOSS.name)
        parts = run.flat.get("training.gradient_accumulation_steps")
        micro_batches = len(steps) * (parts if isinstance(parts, int) else 1)
        dense = median(_dense_flops(run).values()) if trials else 0.0
        shares.append(sum(trials.values()) / (dense * micro_batches) if dense and micro_batches else 0.0)
    return median(shares)


def probe_ratio(runs: Iterable[LoadedRun]) -> Quartiles | None:
    """Return the time of forward and backward over dense's in the same probe, over all probes of all runs."""
    return whole_quartiles((run, time_probes(run)) for run in runs)


def time_probes(run: LoadedRun) -> dict[int, float]:
    """Return the time of forward and backward over dense's in the same probe, by step."""
    dense, policy = (run.series(x.name) for x in (metric.PROBE_DENSE_SECONDS, metric.PROBE_POLICY_SECONDS))
    return {step: policy[step] / dense[step] for step in policy if dense.get(step, 0.0) > 0.0 and policy[step] > 0.0}


def find_limit(runs: Iterable[LoadedRun]) -> float | None:
    """Return the largest speed-up of forward and backward that the policies could give on the probes' batches."""
    return whole_median((run, run.series(metric.LIMIT.name)) for run in runs)


def count_probed(run: LoadedRun) -> dict[int, float]:
    """Return the FLOPs of forward and backward over dense's, by step of a probe. Older runs lack the dense forward, but
    have the ratio of the first step."""
    if not run.series(metric.DENSE_FORWARD.name) and (first := run.series(metric.CHOICE_COST.name)):
        return {max(1, step): ratio for step, ratio in first.items()}
    forward, executed = (run.series(x.name) for x in (metric.FORWARD_FLOPS, metric.BACKWARD_EXECUTED))
    return {s: (forward[s] + executed[s]) / dense for s, dense in _dense_flops(run).items() if s in executed}


def _dense_flops(run: LoadedRun) -> dict[int, float]:
    """Return the FLOPs of a dense forward and backward of one micro-batch, at each step with a probe. Older runs lack
    the dense forward, so use the policy's without its scores; this is too little if a policy changes the forward
    itself."""
    forward, scoring, dense, whole = (
        run.series(x.name)
        for x in (metric.FORWARD_FLOPS, metric.SCORING_FLOPS, metric.BACKWARD_DENSE, metric.DENSE_FORWARD)
    )
    if whole:
        return {s: whole[s] + dense[s] for s in whole if dense.get(s, 0.0) > 0.0}
    return {s: forward[s] - scoring.get(s, 0.0) + dense[s] for s in forward if dense.get(s, 0.0) > 0.0}


def _update_share(run: LoadedRun) -> float | None:
    """Return the time of the update over that of forward and backward, in the same steps."""
    update, forward, backward = (
        run.steady(x.name) for x in (metric.OPTIMIZER_SECONDS, metric.FORWARD_SECONDS, metric.BACKWARD_SECONDS)
    )
    both = ((step, forward[step] + backward[step]) for step in update if step in forward and step in backward)
    shares = [update[step] / seconds for step, seconds in both if seconds > 0.0]
    return median(shares) if shares else None
