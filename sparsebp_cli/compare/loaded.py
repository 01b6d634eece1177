"""One run as a comparison sees it, whether it was read from its folder or from an MLflow store."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from sparsebp_cli.compare.sequential import Looks
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy import make_policy
from sparsebp_cli.run import History, State
from sparsebp_cli.run import metric as names

DIVERGED = re.compile(r"diverged: |the (loss|gradient norm) is (nan|-?inf)")  # older runs do not say the word


class Point(NamedTuple):
    """One value of a metric, and where on its way the run was."""

    step: int
    tokens: float | None
    seconds: float
    value: float


@dataclass
class LoadedRun:
    """One run, read.

    Args:
        run_id: Its id.
        name: What it is called.
        seed: Its seed; None when it does not say.
        group: Hash of all but the seed.
        recipe: The resolved recipe; of a run that somebody else's program logged, its parameters.
        created: Seconds since 1970.
        history: Its journal, or what a store has of it.
        state: What it is doing, or how it ended.
        steps_planned: Optimizer steps of the recipe; None when there is no recipe.
        version: Of the package that made the plan.
        git_sha: Commit that it was run from.
        dirty: Whether there were uncommitted changes.
        recipe_file: Name of the recipe's file.
        source: Where it was read: empty for its folder, else the store's address without password.
        repeats: The first run of this seed in this group that came to an end; empty when this is that one.
        seed_key: Where its recipe or its parameters say the seed; empty: nowhere.
        looks: Those of the trial of ``run --until-ci`` that it was part of; None: it was in none.
        steps_logged: The highest step of any metric, as a store says; None: the metrics tell.
    """

    run_id: str
    name: str
    seed: int | None
    group: str
    recipe: dict[str, Any]
    created: float
    history: History
    state: State
    steps_planned: int | None = None
    version: str = ""
    git_sha: str = ""
    dirty: bool = False
    recipe_file: str = ""
    source: str = ""
    repeats: str = ""
    seed_key: str = "training.seed"
    looks: Looks | None = None
    steps_logged: int | None = None

    @classmethod
    def of_plan(cls, plan: Plan, history: History, state: State, source: str = "") -> LoadedRun:
        """Put together a run of which the plan is known.

        Args:
            plan: The run's.
            history: Its journal, or what a store has of it.
            state: What it is doing.
            source: Where it was read.

        Returns:
            The run.
        """
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
            plan.provenance.recipe_file,
            source,
        )

    @cached_property
    def steps(self) -> int:
        """Optimizer steps done."""
        if self.steps_logged is not None:
            return self.steps_logged
        return max((max(points) for points in self.history.metrics.values() if points), default=0)

    @property
    def is_ours(self) -> bool:
        """Whether its recipe is known, so that it is not another program's run."""
        return self.steps_planned is not None

    @property
    def finished(self) -> bool:
        """Whether it went to its end, and all of it was read."""
        return self.state is State.FINISHED and not self.missing_steps

    @property
    def broke_down(self) -> str:
        """What ended a run whose loss or gradient was no number any more; empty for every other run."""
        text = str(self.history.ends[-1].get("text", "")) if self.history.ends else ""
        return text.removeprefix("diverged: ") if self.state is State.FAILED and DIVERGED.match(text) else ""

    @property
    def missing_steps(self) -> int:
        """Steps of a finished run that its source does not have: it was not sent to the end."""
        if self.state is not State.FINISHED or self.steps_planned is None or not self.source:
            return 0
        return max(0, self.steps_planned - self.steps)

    @cached_property
    def policies(self) -> list[dict[str, Any]]:
        """The recipe's policies, each with its name and options; empty when there is no recipe."""
        found = self.recipe.get("policy")
        return [dict(entry) for entry in found] if isinstance(found, list) else []

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The recipe by dotted path."""
        return flatten(self.recipe)

    @cached_property
    def _series(self) -> dict[str, dict[int, float]]:
        return {}

    def series(self, name: str) -> dict[int, float]:
        """Return a metric's values by step, in the order of steps: sorted once, for a comparison asks many times."""
        if name not in self._series:
            self._series[name] = self.history.series(name)
        return self._series[name]

    def values(self, name: str, *, after_warmup: bool = False) -> list[float]:
        """Return a metric's finite values in the order of steps.

        Args:
            name: Of the metric.
            after_warmup: Leave out the first steps of every attempt, which are slower.

        Returns:
            The values; empty when it was never logged.
        """
        if after_warmup:
            return list(self.steady(name).values())
        return [value for value in self.series(name).values() if math.isfinite(value)]

    def steady(self, name: str) -> dict[int, float]:
        """Return step to value of a metric, without the first steps of every attempt, which are slower."""
        if name not in self._steady:
            series, cold = self.series(name), self._warmup_steps
            found = {step: value for step, value in series.items() if step not in cold and math.isfinite(value)}
            self._steady[name] = found
        return self._steady[name]

    @cached_property
    def _steady(self) -> dict[str, dict[int, float]]:
        return {}

    def evaluations(self, name: str) -> list[float]:
        """Return a metric's values, the last being that after the last step; empty when that one is missing.

        Of a run without a recipe nobody knows what its last step was: its own last value stands for it.
        """
        series = self.series(name)
        if not series or (self.steps_planned is not None and self.steps not in series):
            return []
        return list(series.values())

    def curve(self, name: str) -> tuple[Point, ...]:
        """Return a metric against steps, tokens and seconds of training: only steps count as training.

        Steps of warm-up count as the median of the others: what a machine does once is not what a policy costs.
        """
        done, seconds = self._clock
        tokens = self.series(names.TRAIN_TOKENS.name)
        per_step = self.history.facts.get("tokens_per_step")
        born = min((time for time, _ in self.history.metrics.get(name, {}).values()), default=0.0)
        points = []
        for step, (time, value) in sorted(self.history.metrics.get(name, {}).items()):
            if math.isfinite(value):
                before = bisect_right(done, step)
                passed = (seconds[before - 1] if before else 0.0) if done else time - born
                seen = 0.0 if step == 0 else tokens.get(step, per_step * step if per_step else None)
                points.append(Point(step, seen, passed, value))
        return tuple(points)

    @property
    def training_seconds(self) -> float:
        """How long its steps took together, those of warm-up as long as the median of the others."""
        return self._clock[1][-1] if self._clock[1] else 0.0

    @property
    def is_timed(self) -> bool:
        """Whether it logged the time of its steps; if not, the time of its values stands in."""
        return bool(self._clock[0])

    @cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        series, cold = self.series(names.STEP_SECONDS.name), self._warmup_steps
        warm = [value for step, value in series.items() if step not in cold]
        usual = statistics.median(warm) if warm else None
        done, seconds, total = [], [], 0.0
        # A step whose memory was watched has no time of its own.
        watched = self.series(names.STEP_PEAK_BYTES.name) if usual is not None else {}
        for step in sorted({*series, *watched}):
            total += usual if usual is not None and (step in cold or step not in series) else series[step]
            done.append(step)
            seconds.append(total)
        return done, seconds

    @cached_property
    def _warmup_steps(self) -> frozenset[int]:
        told = self.recipe.get("measure")
        default = told.get("warmup_steps", 0) if isinstance(told, dict) else 0
        num = int(self.history.facts.get("warmup_steps") or default or 0)
        starts = [start for _, start in self.history.warm] or [0]
        return frozenset(step for start in starts for step in range(start + 1, start + 1 + num))

    @cached_property
    def exact(self) -> bool | None:
        """Whether every policy is exact, as the run said itself, else as the installed policies say; None: unknown."""
        if told := self.history.facts.get("policies"):
            return all(policy["exact"] for policy in told)
        if not self.policies:
            return None
        try:
            names_and_options = [(str(entry["name"]), entry) for entry in self.policies]
            return all(
                make_policy(name, **{key: value for key, value in entry.items() if key != "name"}).exact
                for name, entry in names_and_options
            )
        except Exception:  # a plugin that is gone, or whatever its own checks raise
            return None

    @cached_property
    def step_times(self) -> list[float]:
        """When its steps ended, seconds since 1970, sorted."""
        return sorted(time for time, _ in self.history.metrics.get(names.STEP_SECONDS.name, {}).values())


def flatten(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe by dotted path, in its order; empty lists and sections stay as they are."""
    found: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", recipe)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict | list) and value:
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            todo += [(f"{path}.{key}" if path else str(key), child) for key, child in reversed(pairs)]
        else:
            found[path] = value
    return found
