"""The cost of a run counted in dense steps, so that dense can be given as much and not less.

The cost of a policy's step is ``B P + u``, in units of dense forward and backward of one example: B examples a step, P
the time of forward and backward with the policy over that of dense, u the update. A dense step of b examples costs
``b + u``, whatever its learning rate; a run costs its steps times that.

P is the median over all probes of all seeds; with a schedule, the mean of that over its phases. In a probe, dense and
policy alternate on one batch, so that a busy machine slows down both. Without probes, counted FLOPs stand in. Work that
was counted as equal to dense costs as much as dense: if two clocks disagree about equal work, they measured the
machine. u is the time of the update over that of forward and backward in the same steps. Seconds of different runs are
never compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import Quartiles
from sparsebp_cli.compare.whole import whole_quartiles
from sparsebp_cli.run import metric

MOST_OVER = 0.02  # a control may cost this share more than the policy, and nothing less
SAVES = 0.98  # above this share of a dense step's cost, a policy saves nothing that dense could use
EQUAL_WORK = 1e-3  # FLOPs that differ by less are the same work


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step."""

    ratio: Quartiles  # forward and backward, as a multiple of dense on the same batch: median and quartiles over probes
    # how it is known: ``probe`` (timed in turns with dense), ``flops`` (counted), or ``dense`` (the same work)
    by: Literal["probe", "flops", "dense"]
    update: float  # the update, in units of dense forward and backward of one example
    examples: int  # examples a step

    @property
    def units(self) -> float:
        """The cost in units of dense forward and backward of one example."""
        return self.examples * self.ratio.median + self.update

    @property
    def dense_steps(self) -> float:
        """The cost as a multiple of a dense step of the same batch."""
        return self.units / (self.examples + self.update)

    @property
    def spread(self) -> Quartiles:
        """``dense_steps`` with quartiles over probes; the update is added to each."""
        dense, fixed = self.examples + self.update, self.update
        low, middle, high = (
            (self.examples * x + fixed) / dense for x in (self.ratio.low, self.ratio.median, self.ratio.high)
        )
        return Quartiles(middle, low, high, self.ratio.n)

    def relative(self, steps: int, examples: int, num_steps: int, ratio: float = 1.0) -> float:
        """Return the cost of another run as a multiple of this policy's over ``steps``; 1.0 is equal cost. The other
        run has ``num_steps`` of ``examples`` each, and forward and backward of ``ratio`` to dense; 1.0 is dense."""
        return num_steps * (examples * ratio + self.update) / (steps * self.units)


def find_step_cost(runs: Sequence[LoadedRun]) -> StepCost | None:
    """Return the step cost of a group's finished runs; None without probe and count, or where the batch is unknown."""
    if not runs:
        return None
    examples, found = count_examples(runs[-1]), _ratio(runs)
    if examples is None or found is None:
        return None
    ratio, by = found
    updates = [share for run in runs if (share := _update_share(run)) is not None]
    return StepCost(ratio, by, examples * ratio.median * (median(updates) if updates else 0.0), examples)


def count_examples(run: LoadedRun) -> int | None:
    """Return the examples a step of a run; None without a recipe."""
    size = run.flat.get("training.per_device_train_batch_size")
    if not isinstance(size, int):
        return None
    parts = (run.flat.get("training.gradient_accumulation_steps"), run.flat.get("target.processes"))
    return size * math.prod(int(part) for part in parts if isinstance(part, int))


def is_near(cost: float, one_less: float) -> bool:
    """Whether a control costs at least as much as the policy, and hardly more. ``cost`` is the control's, as a multiple
    of the policy's; ``one_less`` the same with one step, or one example a step, less. Steps and examples are whole
    numbers: where there are few, the next larger one is near, however far it is."""
    return cost >= 1.0 - 1e-9 and (cost <= 1.0 + MOST_OVER or one_less < 1.0 - 1e-9)


def whole(needed: float) -> int:
    """Return the steps or examples of a control: 1 % more than needed, within the limit of :func:`is_near`."""
    most = max(math.ceil(needed - 1e-9), math.floor(needed * (1.0 + MOST_OVER)))
    return max(1, min(math.ceil(needed * (1.0 + MOST_OVER / 2)), most))


def _ratio(runs: Sequence[LoadedRun]) -> tuple[Quartiles, Literal["probe", "flops", "dense"]] | None:
    counted = whole_quartiles((run, _counted(run)) for run in runs)
    if runs[-1].exact and counted is not None and abs(counted.median - 1.0) < EQUAL_WORK:
        return Quartiles(1.0, 1.0, 1.0, counted.n), "dense"
    if (timed := probe_ratio(runs)) is not None:
        return timed, "probe"
    return None if counted is None else (counted, "flops")


def probe_ratio(runs: Iterable[LoadedRun]) -> Quartiles | None:
    """Return the time of forward and backward over that of dense in the same probe, over all probes of all runs."""
    found = []
    for run in runs:
        dense, policy = (run.series(x.name) for x in (metric.PROBE_DENSE_SECONDS, metric.PROBE_POLICY_SECONDS))
        ratios = {step: policy[step] / dense[step] for step in policy if dense.get(step, 0.0) > 0.0}
        found.append((run, {step: ratio for step, ratio in ratios.items() if ratio > 0.0}))
    return whole_quartiles(found)


def _counted(run: LoadedRun) -> dict[int, float]:
    """FLOPs of forward and backward over those of dense, by step; the forward's are dense's, without those of
    choosing."""
    forward, scoring, executed, dense = (
        run.series(x.name)
        for x in (metric.FORWARD_FLOPS, metric.SCORING_FLOPS, metric.BACKWARD_EXECUTED, metric.BACKWARD_DENSE)
    )
    steps = [step for step in forward if step in executed and dense.get(step, 0.0) > 0.0]
    return {s: (forward[s] + executed[s]) / (forward[s] - scoring.get(s, 0.0) + dense[s]) for s in steps}


def _update_share(run: LoadedRun) -> float | None:
    """Time of the update over that of forward and backward, in the same steps."""
    update, forward, backward = (
        run.steady(x.name) for x in (metric.OPTIMIZER_SECONDS, metric.FORWARD_SECONDS, metric.BACKWARD_SECONDS)
    )
    passes = {step: forward[step] + backward[step] for step in forward.keys() & backward.keys() & update.keys()}
    shares = [update[step] / seconds for step, seconds in passes.items() if seconds > 0.0]
    return median(shares) if shares else None
