"""One run as a comparison reads it."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import pairwise, starmap
from operator import le
from typing import Any, NamedTuple

from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import make_policy
from sparsebp_cli.run import History, State
from sparsebp_cli.run import metric as names
from sparsebp_cli.run.series import select
from sparsebp_cli.run.stored_recipe import SCHEDULE, is_dense

POLICY_KEY = "policy."  # prefix of a recipe's policies, by dotted path
SEED = "training.seed"


class Point(NamedTuple):
    """One value of a metric, with the step, tokens and training seconds at which it was measured."""

    step: int
    tokens: float | None
    seconds: float | None  # None if step times are withheld or missing
    value: float


@dataclass
class LoadedRun:
    """One loaded run."""

    run_id: str  # its id
    name: str  # its name in tables
    seed: int  # its seed
    group: str  # hash of all but the seed
    recipe: dict[str, object]  # the resolved recipe
    created: float  # seconds since 1970
    history: History  # its event log
    state: State  # its state
    steps_planned: int  # optimizer steps of the recipe
    version: str = ""  # of the package that made the plan
    git_sha: str = ""  # commit of the code that made the plan
    dirty: bool = False  # whether there were uncommitted changes
    repeats: str = ""  # the first ended run of this seed in this group; empty if it is this run
    sequential: bool = False  # whether ``run --until-ci`` of 0.5 trained it

    @classmethod
    def of_plan(cls, plan: Plan, history: History, state: State) -> LoadedRun:
        """Make a run from its plan and its event log."""
        recipe = plan.recipe
        return cls(
            plan.run_id,
            recipe.name,
            recipe.training.seed,
            plan.group,
            recipe.model_dump(mode="json"),
            plan.created,
            history,
            state,
            recipe.training.max_steps,
            plan.provenance.sparsebp_version,
            plan.provenance.git_sha,
            plan.provenance.dirty,
        )

    @cached_property
    def steps(self) -> int:
        """Optimizer steps done."""
        return max((points.last_step for points in self.history.metrics.values()), default=0)

    @property
    def finished(self) -> bool:
        """Whether it finished."""
        return self.state is State.FINISHED

    @property
    def broke_down(self) -> str:
        """The non-finite loss or gradient that ended the run; empty for other runs."""
        end = self.history.ends[-1] if self.history.ends else None
        if end is None or self.state is not State.FAILED or end.get("cause") != "diverged":
            return ""
        return end["text"].removeprefix("diverged: ")

    @property
    def has_reached_limit(self) -> bool:
        """Whether ``training.max_flops`` or the patience of early stopping ended it before its last step."""
        ends = self.history.ends
        return self.finished and bool(ends) and ends[-1].get("cause") == "limit"

    @property
    def steps_to_end(self) -> int:
        """Optimizer steps of the recipe, or the steps done if a limit ended the run."""
        return self.steps if self.has_reached_limit else self.steps_planned

    @cached_property
    def policies(self) -> list[dict[str, object]]:
        """The policies, each with its name and options."""
        found: Any = self.recipe["policy"]
        return [dict(entry) for entry in found]

    @property
    def has_phases(self) -> bool:
        """Whether its policies changed during the training, by a key of 0.5."""
        return any(entry["name"] == SCHEDULE for entry in self.policies)

    @property
    def is_dense(self) -> bool:
        """Whether its recipe has no policy."""
        return is_dense(self.recipe)

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The recipe by dotted path."""
        return flatten(self.recipe)

    @cached_property
    def _series(self) -> dict[str, Mapping[int, float]]:
        return {}

    def series(self, name: str) -> Mapping[int, float]:
        """Return a metric's values by step. They are cached, because a comparison reads them many times."""
        if name not in self._series:
            self._series[name] = self.history.series(name)
        return self._series[name]

    def _timed(self, name: str) -> Iterable[tuple[float, float]]:
        return self.history.metrics[name].values() if name in self.history.metrics else ()

    def values(self, name: str, *, after_warmup: bool = False) -> list[float]:
        """Return a metric's finite values by step. ``after_warmup`` omits the slower first steps of each attempt."""
        if after_warmup:
            return list(self.steady(name).values())
        return [value for value in self.series(name).values() if math.isfinite(value)]

    def steady(self, name: str) -> Mapping[int, float]:
        """Return step to value of a metric, without the slower first steps of every attempt."""
        if name not in self._steady:
            cold = self._warmup_steps
            self._steady[name] = select(self.series(name), lambda step, x: step not in cold and math.isfinite(x))
        return self._steady[name]

    @cached_property
    def _steady(self) -> dict[str, Mapping[int, float]]:
        return {}

    def evaluations(self, name: str) -> list[float]:
        """Return a metric's values, the last one being that after the last step; empty if that one is missing."""
        series = self.series(name)
        return list(series.values()) if self.steps in series else []

    def curve(self, name: str) -> tuple[Point, ...]:
        """Return a metric against steps, tokens and seconds of training, in which only steps count. Warm-up steps count
        as the median of the others, because their extra time belongs to the machine, not to the policy."""
        done, seconds = self._clock
        tokens = self.series(names.TRAIN_TOKENS.name)
        per_step = self.history.facts.get("tokens_per_step")
        points = []
        for step, value in self.series(name).items():
            if math.isfinite(value):
                before = bisect_right(done, step)
                passed = (seconds[before - 1] if before else 0.0) if done else None
                seen = 0.0 if step == 0 else tokens.get(step, per_step * step if per_step else None)
                points.append(Point(step, seen, passed, value))
        return tuple(points)

    @property
    def training_seconds(self) -> float:
        """Total seconds of all steps; warm-up steps count as the median of the others."""
        return self._clock[1][-1] if self._clock[1] else 0.0

    @cached_property
    def _clock(self) -> tuple[Sequence[int], Sequence[float]]:
        series, cold = self.series(names.STEP_SECONDS.name), self._warmup_steps
        warm = array("d", (value for step, value in series.items() if step not in cold))
        usual = statistics.median(warm) if warm else None
        done: array[int] = array("q")
        seconds: array[float] = array("d")
        total = 0.0
        # A step whose peak memory was measured has no valid time.
        watched = self.series(names.STEP_PEAK_BYTES.name) if usual is not None else {}
        for step in merge(series, (step for step in watched if step not in series)):
            total += usual if usual is not None and (step in cold or step not in series) else series[step]
            done.append(step)
            seconds.append(total)
        return done, seconds

    @cached_property
    def _warmup_steps(self) -> frozenset[int]:
        measure = self.recipe.get("measure")
        default = measure.get("warmup_steps", 0) if isinstance(measure, dict) else 0
        num = int(self.history.facts.get("warmup_steps") or default or 0)
        starts = [start for _, start in self.history.warm] or [0]
        return frozenset(step for start in starts for step in range(start + 1, start + 1 + num))

    @cached_property
    def exact(self) -> bool | None:
        """Whether every policy is exact, by the run's own record, else by the installed policies; None if unknown."""
        if recorded := self.history.facts.get("policies"):
            return all(policy["exact"] for policy in recorded)
        try:
            return all(
                make_policy(str(entry["name"]), **{key: value for key, value in entry.items() if key != "name"}).exact
                for entry in self.policies
            )
        except Exception:  # the plug-in is missing, or its checks raise anything
            return None

    @cached_property
    def step_times(self) -> Sequence[float]:
        """Sorted end times of its steps, in seconds since 1970."""
        times = array("d", (time for time, _ in self._timed(names.STEP_SECONDS.name)))
        return times if all(starmap(le, pairwise(times))) else array("d", sorted(times))


def flatten(recipe: Mapping[str, object]) -> dict[str, Any]:
    """Return a recipe by dotted path, in its order. Empty lists and sections are kept."""
    found: dict[str, object] = {}
    todo: list[tuple[str, object]] = [("", recipe)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict | list) and value:
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            # Reversed, because the list is taken from its end.
            todo += [(f"{path}.{key}" if path else str(key), child) for key, child in reversed(pairs)]
        else:
            found[path] = value
    return found
