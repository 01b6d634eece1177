"""Reads runs: each plan and each journal once, and what a comparison needs of them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import make_policy
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.run import metric as names
from sparsebp_cli.tracking.content import find_state


@dataclass
class LoadedRun:
    """One run, read.

    Args:
        run: Its folder.
        plan: Its plan.
        history: Its journal.
        state: What it is doing, or how it ended.
        superseded_by: A newer run of the same seed in the same group; empty when this one counts.
    """

    run: RunFolder
    plan: Plan
    history: History
    state: State
    superseded_by: str = field(default="")

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return self.plan.recipe.training.seed

    @cached_property
    def group(self) -> str:
        """Content hash of all but the seed."""
        return self.plan.group

    @cached_property
    def steps(self) -> int:
        """Optimizer steps done."""
        return max((step for points in self.history.metrics.values() for step in points), default=0)

    @property
    def finished(self) -> bool:
        """Whether it went to its end."""
        return self.state is State.FINISHED

    def values(self, name: str, *, after_warmup: bool = False) -> list[float]:
        """Return a metric's finite values in the order of steps.

        Args:
            name: Of the metric.
            after_warmup: Leave out the first steps of every attempt, which are slower.

        Returns:
            The values; empty when it was never logged.
        """
        series = self.history.series(name)
        cold = self._warmup_steps if after_warmup else frozenset[int]()
        return [value for step, value in series.items() if step not in cold and math.isfinite(value)]

    def final(self, name: str) -> float | None:
        """Return a metric's value after the last step; None when it has none there."""
        return self.history.series(name).get(self.steps)

    def curve(self, name: str) -> tuple[tuple[int, float, float], ...]:
        """Return (step, seconds of training until then, value) at each evaluation; only steps count as training."""
        done, seconds, total = [], [], 0.0
        for step, value in self.history.series(names.STEP_SECONDS.name).items():
            total += value
            done.append(step)
            seconds.append(total)
        points = []
        for step, value in self.history.series(name).items():
            before = bisect_right(done, step)
            if math.isfinite(value):
                points.append((step, seconds[before - 1] if before else 0.0, value))
        return tuple(points)

    @cached_property
    def _warmup_steps(self) -> frozenset[int]:
        num = int(self.history.facts.get("warmup_steps", self.plan.recipe.measure.warmup_steps))
        return frozenset(step for _, start in self.history.warm for step in range(start + 1, start + 1 + num))

    @cached_property
    def exact(self) -> bool | None:
        """Whether every policy is exact, as the run said itself, else as the installed policies say; None: unknown."""
        if told := self.history.facts.get("policies"):
            return all(policy["exact"] for policy in told)
        try:
            return all(make_policy(entry.name, **entry.options).exact for entry in self.plan.recipe.policy)
        except Exception:  # a plugin that is gone, or whatever its own checks raise
            return None

    @cached_property
    def step_times(self) -> list[float]:
        """When its steps ended, seconds since 1970, sorted."""
        return sorted(time for time, _ in self.history.metrics.get(names.STEP_SECONDS.name, {}).values())


def load(runs: Iterable[RunFolder]) -> list[LoadedRun]:
    """Read runs, in the order given; a run given twice is read once.

    Args:
        runs: Any runs.

    Returns:
        Them, with those that a newer run of the same seed replaces marked so.
    """
    loaded = []
    for run in dict.fromkeys(runs):
        plan, history = Plan.load(run.plan_file), History.load(run.path)
        loaded.append(LoadedRun(run, plan, history, find_state(run, history)))
    _mark_superseded(loaded)
    return loaded


def _mark_superseded(runs: Sequence[LoadedRun]) -> None:
    """Of the finished runs of one seed, the newest counts."""
    newest: dict[tuple[str, int], LoadedRun] = {}
    for run in sorted((run for run in runs if run.finished), key=lambda run: (run.plan.created, run.run.run_id)):
        if older := newest.get((run.group, run.seed)):
            older.superseded_by = run.run.run_id
        newest[run.group, run.seed] = run


def ran_together(runs: Sequence[LoadedRun]) -> list[tuple[LoadedRun, LoadedRun]]:
    """Return pairs of runs whose steps interleave in time: on one machine they slowed each other down.

    Args:
        runs: Runs that count.

    Returns:
        Each neighbouring pair in time once.
    """
    timed = sorted((run for run in runs if run.step_times), key=lambda run: run.step_times[0])
    pairs = []
    for index, first in enumerate(timed):
        for second in timed[index + 1 :]:
            if second.step_times[0] >= first.step_times[-1]:
                break
            # A run that did its work while the other was interrupted did not disturb it.
            low = bisect_left(first.step_times, second.step_times[0])
            high = bisect_right(first.step_times, second.step_times[-1])
            if high > low:
                pairs.append((first, second))
    return pairs
