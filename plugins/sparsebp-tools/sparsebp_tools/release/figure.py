"""Compute the numbers of a model card: values for these weights, with intervals over held-out examples, and the result
of a comparison with dense training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsebp_cli.compare import Comparison, LoadedRun, compare_runs
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.number import of_spread
from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State, list_runs
from sparsebp_cli.run.stored_recipe import is_dense
from sparsebp_tools.release.interval import estimate_mean
from sparsebp_tools.release.weights import ReleasedWeights

JUDGED = ("eval/", "test/", "lm_eval/")
MOST_RUNS = 60  # runs of the same recipe, with and without policies, that a card reads


@dataclass(frozen=True)
class CardFigure:
    """A measurement of these weights.

    Args:
        name: Name of the metric.
        unit: Its unit; empty for a pure number.
        before: Value before the first step; None if it was not measured then.
        value: Value of these weights.
        low: Lower end of the 95 % interval over held-out examples; None if examples were not stored.
        high: Its upper end.
        count: Number of examples behind the interval.
    """

    name: str
    unit: str
    before: float | None
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0


@dataclass(frozen=True)
class Beside:
    """Results of the same recipe's other runs on this machine: over seeds, and compared with dense."""

    metric: str = ""
    seeds: str = ""  # the metric over the seeds of this recipe, in words; empty for a single seed
    verdict: str = ""  # result of the comparison with dense; empty without dense runs
    warnings: tuple[str, ...] = field(default=())


def list_figures(run: RunFolder, weights: ReleasedWeights, history: History) -> list[CardFigure]:
    """Return the measurements of these weights: on validation after their step, and for the final weights on the test
    split and by the harness."""
    return list(_list(load_folder(run), weights, history))


def _list(loaded: LoadedRun, weights: ReleasedWeights, history: History) -> Iterator[CardFigure]:
    for name in sorted(history.metrics):
        if not name.startswith(JUDGED) or (not name.startswith("eval/") and not weights.is_end):
            continue
        series = history.series(name)
        value = series.get(weights.step)
        if value is None or not math.isfinite(value):
            continue
        known = history.find_metric(name)
        first = next(iter(series)) if series else None
        before = series[0] if first == 0 and weights.step > 0 else None
        found = estimate_mean(loaded, name, value) if weights.is_end else None
        unit = known.unit if known is not None and known.unit != "share" else ""
        if found is None or found.low is None:
            yield CardFigure(name, unit, before, value)
        else:
            yield CardFigure(name, unit, before, value, found.low, found.high, found.n)


def compare_here(run: RunFolder, plan: Plan) -> Beside:
    """Compare a finished run with this machine's runs of its recipe, with other seeds or dense."""
    runs = _find_company(run)
    try:
        found = compare_runs(runs)
    except SparseBPError:  # such as runs without a common metric
        return Beside()
    mine = next(line.group for line in found.runs if line.run_id == plan.run_id)  # a copy keeps the id of its plan
    group = next(group for group in found.groups if group.group == mine)
    has_dense = len(found.groups) > 1 and not is_dense(plan.recipe.model_dump(mode="json"))
    verdict = group.verdict if has_dense and group.group != found.baseline else ""
    return Beside(found.metric, _over_seeds(found, mine), verdict, found.warnings if verdict else ())


def _over_seeds(found: Comparison, mine: str) -> str:
    final = next(group for group in found.groups if group.group == mine).quality.final
    return of_spread(final) if final is not None and final.n > 1 else ""


def _find_company(run: RunFolder) -> list[RunFolder]:
    """Return the run and finished ones that differ from it only in the seed or by having no policy."""
    own = run.read_plan()["recipe"]
    found = [run]
    for other in list_runs():
        if other.run_id == run.run_id or len(found) == MOST_RUNS:
            continue
        try:
            recipe = other.read_plan()["recipe"]
        except SparseBPError:
            continue
        has_policy = _describe_policy(recipe) == _describe_policy(own)
        if _question(recipe) == _question(own) and (has_policy or is_dense(recipe)):
            found += [other] if other.state() is State.FINISHED else []
    return found


def _question(recipe: dict[str, Any]) -> str:
    """Return the part of a recipe that a run shares with its dense control."""
    training = {key: value for key, value in recipe["training"].items() if key != "seed"}
    return json.dumps([recipe.get("model"), recipe.get("dataset"), training], sort_keys=True)


def _describe_policy(recipe: dict[str, Any]) -> str:
    return json.dumps([recipe.get("policy"), recipe.get("backward")], sort_keys=True)
