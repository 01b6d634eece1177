"""Measure how soon runs reach a value of the metric, with censoring if some never do.

A run that never reaches the value would have needed an unknown time beyond its training. Leaving it out would keep only
the winners. So with any censored run there is no interval. The mean is then a lower bound, in which such runs count
with all of their training. A run with ten times as many evaluations shows the crossing earlier, so only steps at which
all runs were evaluated count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.compare.figure import by_seed
from sparsebp_cli.compare.loaded import LoadedRun, Point
from sparsebp_cli.compare.measured import Reach
from sparsebp_cli.compare.statistics import paired_ratio, spread


@dataclass(frozen=True)
class Goal:
    """The value to be reached."""

    metric: str  # name of the quality metric
    target: float  # the value to reach
    higher_is_better: bool  # the direction in which the value is passed
    steps: frozenset[int]  # steps at which all runs that came so far were evaluated; see :func:`find_common_steps`

    def find(self, run: LoadedRun) -> Point | None:
        """Return the first evaluation at or past the value, without interpolation; None if there is none."""
        for point in run.curve(self.metric):
            past = point.value >= self.target if self.higher_is_better else point.value <= self.target
            if past and point.step in self.steps:
                return point
        return None


def find_common_steps(runs: Sequence[LoadedRun], name: str) -> frozenset[int]:
    """Return the steps at which every run that was still training was evaluated."""
    evaluated = [steps for run in runs if (steps := {point.step for point in run.curve(name)})]
    # Compare by identity, because a set has no hash.
    last = {id(steps): max(steps) for steps in evaluated}
    return frozenset(
        step for step in set().union(*evaluated) if all(step in steps for steps in evaluated if last[id(steps)] >= step)
    )


def measure_reach(
    goal: Goal, runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], lost: int = 0, baseline_lost: int = 0
) -> Reach:
    """Return how soon a group reached the goal: means and a ratio if every run did, a lower bound if some did not.
    ``baseline`` is empty for the baseline itself. ``lost`` and ``baseline_lost`` count runs that failed or diverged."""
    found = {run.run_id: point for run in (*runs, *baseline) if (point := goal.find(run))}
    mine = [found[run.run_id] for run in runs if run.run_id in found]
    is_whole = len(mine) == len(runs) > 0 and not lost
    is_baseline_whole = all(run.run_id in found for run in baseline) and not baseline_lost

    def seconds(run: LoadedRun) -> float | None:
        return found[run.run_id].seconds or None

    def longest(run: LoadedRun) -> Point | None:
        curve = run.curve(goal.metric)
        return found.get(run.run_id) or (curve[-1] if curve else None)

    bounds = [point for run in runs if (point := longest(run))]
    steps, times = [float(point.step) for point in bounds], [point.seconds or 0.0 for point in bounds]
    return Reach(
        reached=len(mine),
        of=len(runs) + lost,
        steps=spread(steps) if is_whole else None,
        seconds=spread(times) if is_whole else None,
        ratio=(
            paired_ratio(by_seed(runs, seconds), by_seed(baseline, seconds))
            if baseline and is_whole and is_baseline_whole
            else None
        ),
        at_least_steps=None if is_whole or not steps else sum(steps) / len(steps),
        at_least_seconds=None if is_whole or not times else sum(times) / len(times),
        censored=not is_whole or not is_baseline_whole,
    )
