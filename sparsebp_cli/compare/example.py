"""Compares two trained models on the same held-out examples, example by example."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Literal

from sparsebp_cli.compare.family import correct_all
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import ExampleDifference
from sparsebp_cli.compare.question import Way
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, LEVEL, Difference, quantile_t, summarise_clusters
from sparsebp_cli.run.metric import EVAL_LOSS, TEST_LOSS

FEWEST_DOCUMENTS = 10  # below this the t quantile grows fast and one long document decides
LOSS = "loss"
HARNESS, TEST = "lm_eval/", "test/"  # begin the names of metrics of other examples than the validation split's
NUM_BLOCKS = 10  # of consecutive examples, each longer than most documents


def compare_examples(
    runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun], metric: str = LOSS, way: Way = "lower"
) -> tuple[ExampleDifference, ...]:
    """Pair the runs of a group and of the baseline by seed, and the examples within each pair. Returns one entry for
    each shared seed whose runs kept, of the same examples after their last step, their shares of the metric or their
    losses. ``way`` is the better direction of the metric."""
    here, there = ({run.seed: run for run in some if run.seed is not None} for some in (runs, baseline))
    found = []
    for seed in sorted(here.keys() & there.keys()):
        name = metric if _subtract_scores(here[seed], there[seed], metric) else LOSS
        differences = _subtract_scores(here[seed], there[seed], metric) or _subtract(here[seed], there[seed])
        if differences:
            values, sign = list(differences.values()), -1.0 if name == metric and way == "higher" else 1.0
            worse = sum(sign * difference > 0.0 for difference in values) / len(values)
            clusters, kind = _cluster(list(differences), here[seed], name)
            difference = summarise_clusters(values, clusters)
            found.append(ExampleDifference(seed, difference, worse, len(set(clusters)), kind, name))
    return tuple(found)


def estimate_mean(run: LoadedRun, metric: str, value: float) -> Difference | None:
    """Return a metric of a run after its last step with an interval over held-out examples, clustered as their
    differences are; None where the run did not keep what each example gives to it.

    A loss is the mean over targets, so an example counts with its targets: the interval is that of the ratio of two
    sums, by the deviations of each example."""
    kept = run.history.test_examples if metric.startswith(TEST) else run.history.examples
    entry = kept.get(run.steps, {})
    values: list[float] = []
    if metric in (EVAL_LOSS.name, TEST_LOSS.name) and entry.get("targets"):
        mean = sum(entry["targets"]) / len(entry["targets"])
        pairs = zip(entry["loss"], entry["targets"], strict=True)
        values = [value + targets * (loss - value) / mean for loss, targets in pairs if mean and _is_number(loss)]
    elif scores := run.history.scores.get(run.steps, {}).get(metric):
        values = [float(score) for score in scores if _is_number(score)]
    if len(values) < FEWEST_PAIRS:
        return None
    clusters, _ = _cluster(list(range(len(values))), run, metric)
    found = summarise_clusters(values, clusters)
    if set(values) <= {0.0, 1.0} and found.low is not None:
        low, high = bound_share(found, len(set(clusters)))
        found = replace(found, low=low, high=high)
    # Examples beyond those kept, or ignored ones, make another mean: then nothing is said of the value.
    return found if math.isclose(found.mean, value, rel_tol=1e-3, abs_tol=1e-6) else None


def bound_share(found: Difference, num_clusters: int) -> tuple[float, float]:
    """Return the 95% interval of a share of examples (E. Wilson, 1927), which stays within 0 and 1 and has a width at
    its ends, where none or all have matched. Examples in clusters count as the fewer independent ones whose share would
    have the same error; where that is 0, each cluster counts as one."""
    share, number, z = found.mean, float(found.n), NormalDist().inv_cdf(0.5 + LEVEL / 2)
    if num_clusters < found.n:
        error = (found.error or 0.0) * quantile_t(0.5 + LEVEL / 2, num_clusters - 1) / z
        number = min(number, share * (1.0 - share) / error**2) if error else float(num_clusters)
    middle = share + z**2 / (2.0 * number)
    half = z * math.sqrt(share * (1.0 - share) / number + z**2 / (4.0 * number**2))
    return max(0.0, (middle - half) / (1.0 + z**2 / number)), min(1.0, (middle + half) / (1.0 + z**2 / number))


def correct_examples(groups: Sequence[tuple[ExampleDifference, ...]]) -> list[tuple[ExampleDifference, ...]]:
    """Correct the statements on examples of all groups for their number, over all seeds and groups."""
    corrected = iter(correct_all([entry.difference for entries in groups for entry in entries]))
    return [
        tuple(replace(entry, difference=found) for entry in entries if (found := next(corrected))) for entries in groups
    ]


def have_other_examples(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> bool:
    """Whether runs are known to have been evaluated on other examples, by the number of examples or of their targets.
    The dataset's digest does not tell: it covers the training examples, too. False where nothing is known."""
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
    """Position of an example to the difference of its losses."""
    here, there = (some.history.examples.get(some.steps, {}) for some in (run, other))
    digests = {some.history.facts.get("dataset_digest") for some in (run, other)}
    if len(digests) > 1 or here.get("targets") != there.get("targets"):
        return {}
    losses = enumerate(zip(here.get("loss", []), there.get("loss", []), strict=False))
    return {place: a - b for place, (a, b) in losses if _is_number(a) and _is_number(b)}


def _subtract_scores(run: LoadedRun, other: LoadedRun, metric: str) -> dict[int, float]:
    """Position of an example to the difference of what it gives to the metric; empty where that is not known of the
    same examples."""
    here, there = (some.history.scores.get(some.steps, {}).get(metric, []) for some in (run, other))
    kinds = {_identify(some, metric) for some in (run, other)}
    if len(here) != len(there) or len(kinds) > 1:
        return {}
    shares = enumerate(zip(here, there, strict=True))
    return {place: a - b for place, (a, b) in shares if _is_number(a) and _is_number(b)}


def _identify(run: LoadedRun, metric: str) -> object:
    """Return what tells the examples of a metric from others: the hash of a harness's task, or the data's digest."""
    if not metric.startswith(HARNESS):
        return run.history.facts.get("dataset_digest")
    judged: Any = run.history.facts.get("lm_eval", {})
    tasks = judged.get("tasks", {}) if isinstance(judged, dict) else {}
    about = next((about for task, about in tasks.items() if metric.startswith(f"{HARNESS}{task}/")), None)
    return json.dumps(about, sort_keys=True)


def _cluster(places: Sequence[int], run: LoadedRun, metric: str) -> tuple[list[int], Literal["document", "block"]]:
    """Return the cluster of each example: its document, or where too few are known its block of neighbours."""
    kept = run.history.test_examples if metric.startswith(TEST) else run.history.examples
    documents = [] if metric.startswith(HARNESS) else kept.get(run.steps, {}).get("documents", [])
    if documents and places[-1] < len(documents):
        named = [int(documents[place]) for place in places]
        if len(set(named)) >= FEWEST_DOCUMENTS:
            return named, "document"
    blocks = max(FEWEST_PAIRS, min(NUM_BLOCKS, len(places) // FEWEST_PAIRS))
    return [number * blocks // len(places) for number in range(len(places))], "block"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
