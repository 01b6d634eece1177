"""Compare two trained models on the same held-out examples, example by example."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from sparsebp_cli.compare.family import correct_all
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import ExampleDifference
from sparsebp_cli.compare.question import Way
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, summarise_clusters

FEWEST_DOCUMENTS = 10  # with fewer, the t quantile grows fast and one long document decides
LOSS = "loss"
HARNESS, TEST = "lm_eval/", "test/"  # prefixes of metrics of other examples than the validation split's
NUM_BLOCKS = 10  # number of blocks of consecutive examples, each longer than most documents


def compare_examples(
    runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], metric: str = LOSS, way: Way = "lower"
) -> tuple[ExampleDifference, ...]:
    """Pair the runs of a group and the baseline by seed, and the examples within each pair. Return one entry for each
    shared seed whose runs kept the examples' scores for the metric, or their losses, after the last step on the same
    examples. ``way`` is the better direction of the metric."""
    here, there = ({run.seed: run for run in some} for some in (runs, baseline))
    found = []
    for seed in sorted(here.keys() & there.keys()):
        name = metric if _subtract_scores(here[seed], there[seed], metric) else LOSS
        differences = _subtract_scores(here[seed], there[seed], metric) or _subtract(here[seed], there[seed])
        if differences:
            values, sign = list(differences.values()), -1.0 if name == metric and way == "higher" else 1.0
            worse = sum(sign * difference > 0.0 for difference in values) / len(values)
            clusters, kind = cluster_examples(list(differences), here[seed], name)
            difference = summarise_clusters(values, clusters)
            found.append(ExampleDifference(seed, difference, worse, len(set(clusters)), kind, name))
    return tuple(found)


def correct_examples(groups: Sequence[tuple[ExampleDifference, ...]]) -> list[tuple[ExampleDifference, ...]]:
    """Correct the statements on examples of all groups for their number, over all seeds and groups."""
    corrected = iter(correct_all([entry.difference for entries in groups for entry in entries]))
    return [
        tuple(replace(entry, difference=found) for entry in entries if (found := next(corrected))) for entries in groups
    ]


def have_other_examples(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> bool:
    """Return whether runs are known to have other evaluation examples, by the number of examples or their targets. The
    dataset's digest does not help, because it also covers training examples. Return False if nothing is known."""
    for what in (_count_examples, _list_targets):
        here, there = ({what(run) for run in some} - {None} for some in (runs, others))
        if here and there and here != there:
            return True
    return False


def _count_examples(run: LoadedRun) -> object:
    return run.history.facts.get("eval_examples")


def _list_targets(run: LoadedRun) -> tuple[float, ...] | None:
    targets = run.history.examples.get(run.steps, {}).get("targets")
    return tuple(sorted(targets)) if targets else None


def _subtract(run: LoadedRun, other: LoadedRun) -> dict[int, float]:
    """Map an example's index to the difference of its losses."""
    here, there = (some.history.examples.get(some.steps, {}) for some in (run, other))
    digests = {some.history.facts.get("dataset_digest") for some in (run, other)}
    if len(digests) > 1 or here.get("targets") != there.get("targets"):
        return {}
    losses = enumerate(zip(here.get("loss", []), there.get("loss", []), strict=False))
    return {place: a - b for place, (a, b) in losses if is_number(a) and is_number(b)}


def _subtract_scores(run: LoadedRun, other: LoadedRun, metric: str) -> dict[int, float]:
    """Map an example's index to the difference of its scores for the metric; empty if examples may differ."""
    here, there = (some.history.scores.get(some.steps, {}).get(metric, []) for some in (run, other))
    kinds = {_identify(some, metric) for some in (run, other)}
    if len(here) != len(there) or len(kinds) > 1:
        return {}
    shares = enumerate(zip(here, there, strict=True))
    return {place: a - b for place, (a, b) in shares if is_number(a) and is_number(b)}


def _identify(run: LoadedRun, metric: str) -> object:
    """Return an identifier of a metric's examples: the hash of a harness's task, or the data's digest."""
    if not metric.startswith(HARNESS):
        return run.history.facts.get("dataset_digest")
    judged: Any = run.history.facts.get("lm_eval", {})
    tasks = judged.get("tasks", {}) if isinstance(judged, dict) else {}
    about = next((about for task, about in tasks.items() if metric.startswith(f"{HARNESS}{task}/")), None)
    return json.dumps(about, sort_keys=True)


def cluster_examples(
    places: Sequence[int], run: LoadedRun, metric: str
) -> tuple[list[int], Literal["document", "block"]]:
    """Return the cluster of each example: its document, or its block of neighbours if too few documents are known."""
    kept = run.history.test_examples if metric.startswith(TEST) else run.history.examples
    documents = [] if metric.startswith(HARNESS) else kept.get(run.steps, {}).get("documents", [])
    if documents and places[-1] < len(documents):
        named = [int(documents[place]) for place in places]
        if len(set(named)) >= FEWEST_DOCUMENTS:
            return named, "document"
    blocks = max(FEWEST_PAIRS, min(NUM_BLOCKS, len(places) // FEWEST_PAIRS))
    return [number * blocks // len(places) for number in range(len(places))], "block"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
