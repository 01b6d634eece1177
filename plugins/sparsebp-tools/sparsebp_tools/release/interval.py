"""Compute intervals over held-out examples, for the numbers of a model card."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from sparsebp_cli.compare.example import TEST, cluster_examples, is_number
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, LEVEL, Difference, quantile_t, summarise_clusters
from sparsebp_cli.run.metric import EVAL_LOSS, TEST_LOSS


def estimate_mean(run: LoadedRun, metric: str, value: float) -> Difference | None:
    """Return a run's metric after its last step with an interval over held-out examples, or None.

    None if the run did not store each example's contribution. Examples are clustered as in comparisons. A loss is a
    mean over targets, so an example counts with its targets: the interval is that of a ratio of two sums, from the
    deviations of each example.
    """
    kept = run.history.test_examples if metric.startswith(TEST) else run.history.examples
    entry = kept.get(run.steps, {})
    values: list[float] = []
    if metric in (EVAL_LOSS.name, TEST_LOSS.name) and entry.get("targets"):
        mean = sum(entry["targets"]) / len(entry["targets"])
        pairs = zip(entry["loss"], entry["targets"], strict=True)
        values = [value + targets * (loss - value) / mean for loss, targets in pairs if mean and is_number(loss)]
    elif scores := run.history.scores.get(run.steps, {}).get(metric):
        values = [float(score) for score in scores if is_number(score)]
    if len(values) < FEWEST_PAIRS:
        return None
    clusters, _ = cluster_examples(list(range(len(values))), run, metric)
    found = summarise_clusters(values, clusters)
    if set(values) <= {0.0, 1.0} and found.low is not None:
        low, high = bound_share(found, len(set(clusters)))
        found = replace(found, low=low, high=high)
    elif metric in (EVAL_LOSS.name, TEST_LOSS.name) and found.low is not None:
        found = replace(found, low=max(0.0, found.low))  # no loss is negative
    # More examples than stored, or ignored ones, give another mean; then there is no interval.
    return found if math.isclose(found.mean, value, rel_tol=1e-3, abs_tol=1e-6) else None


def bound_share(found: Difference, num_clusters: int) -> tuple[float, float]:
    """Return the 95% interval of a fraction of examples (E. Wilson, 1927). It stays within 0 and 1 and has a width even
    if none or all match. Clustered examples count as the smaller number of independent ones with the same error; if
    that error is 0, each cluster counts as one."""
    share, number, z = found.mean, float(found.n), NormalDist().inv_cdf(0.5 + LEVEL / 2)
    if num_clusters < found.n:
        error = (found.error or 0.0) * quantile_t(0.5 + LEVEL / 2, num_clusters - 1) / z
        number = min(number, share * (1.0 - share) / error**2) if error else float(num_clusters)
    middle = share + z**2 / (2.0 * number)
    half = z * math.sqrt(share * (1.0 - share) / number + z**2 / (4.0 * number**2))
    return max(0.0, (middle - half) / (1.0 + z**2 / number)), min(1.0, (middle + half) / (1.0 + z**2 / number))
