"""Sentences on the held-out examples of one seed: clustered, corrected, and called descriptive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.compare.statistics import summarise, summarise_clusters
from sparsebp_cli.run import JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
NUM_EXAMPLES, SIZE = 200, 10


def topk(make_run: MakeRun, number: int) -> RunFolder:
    entry = [{"name": "topk", "keep": 0.01 * (number + 1), "along": "rows"}]
    return make_run(f"topk-{number}", policy=entry, exact=False)


def record(run: RunFolder, losses: np.ndarray, documents: list[int] | None = None) -> RunFolder:
    values: dict[str, Any] = {"loss": [float(x) for x in losses], "targets": [9] * len(losses)}
    with JournalWriter(run.path, durable=False) as journal:
        known = {} if documents is None else {"documents": documents}
        journal.write("examples", step=20, values=values | known)
    return run


def noise(seed: int, correlation: float = 0.5) -> np.ndarray:
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.normal(size=NUM_EXAMPLES // SIZE), SIZE)
    return correlation**0.5 * shared + (1 - correlation) ** 0.5 * draw.normal(size=NUM_EXAMPLES)


def test_one_cluster_an_example_is_the_plain_interval() -> None:
    values = [float(x) for x in np.random.default_rng(0).normal(size=40)]
    plain, clustered = summarise(values), summarise_clusters(values, range(40))
    assert (clustered.low, clustered.high, clustered.p) == pytest.approx((plain.low, plain.high, plain.p))


def test_clusters_of_one_size_are_the_interval_of_their_means() -> None:
    values = noise(1)
    clusters = np.arange(NUM_EXAMPLES) // SIZE
    found = summarise_clusters(list(values), list(clusters))
    means = summarise(list(values.reshape(-1, SIZE).mean(axis=1)))
    assert (found.mean, found.low, found.high, found.p) == pytest.approx((means.mean, means.low, means.high, means.p))
    assert found.n == NUM_EXAMPLES


def test_two_documents_give_no_interval() -> None:
    assert summarise_clusters([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1]).low is None


def test_examples_of_one_document_do_not_count_as_independent() -> None:
    clusters = list(np.arange(NUM_EXAMPLES) // SIZE)
    plain = sum(summarise(list(noise(s))).p < 0.05 for s in range(300))  # type: ignore[operator]
    found = sum(summarise_clusters(list(noise(s)), clusters).p < 0.05 for s in range(300))  # type: ignore[operator]
    assert plain > 90
    assert found < 30


def test_documents_of_the_journal_are_the_clusters_else_blocks_of_neighbours(make_run: MakeRun) -> None:
    documents = [place // SIZE for place in range(NUM_EXAMPLES)]
    for known, shown in ((documents, (20, "document")), (None, (10, "block")), ([0] * NUM_EXAMPLES, (10, "block"))):
        dense = record(make_run(), np.zeros(NUM_EXAMPLES), known)
        other = record(topk(make_run, 0), noise(3), known)
        entry = compare_runs([dense, other]).groups[1].quality.examples[0]
        assert (entry.clusters, entry.clustered_by) == shown


def test_with_ten_groups_the_sentences_on_examples_are_one_corrected_family(make_run: MakeRun) -> None:
    documents = list(range(NUM_EXAMPLES))
    dense = record(make_run(), np.zeros(NUM_EXAMPLES), documents)
    lone = noise(0, 0.0)
    lone += 2.2 / NUM_EXAMPLES**0.5 - lone.mean()  # shown alone, p about 0.03
    groups = [record(topk(make_run, 0), lone, documents)]
    groups += [record(topk(make_run, k), noise(k, 0.0) - noise(k, 0.0).mean(), documents) for k in range(1, 10)]
    alone = compare_runs([dense, groups[0]]).groups[1]
    assert "has a larger loss" in alone.verdict
    assert "as a description of two models" in alone.verdict
    together = compare_runs([dense, *groups]).groups[1]
    assert "is not shown to differ in loss" in together.verdict
    assert together.quality.examples[0].difference.p_holm == pytest.approx(
        10 * (alone.quality.examples[0].difference.p or 0)
    )


def score(run: RunFolder, values: dict[str, list[float]], **facts: Any) -> RunFolder:
    declared = {"metrics": {name: {"unit": "", "better": "higher"} for name in values}}
    with JournalWriter(run.path, durable=False) as journal:
        journal.write("facts", values=declared | facts)
        journal.write("metrics", step=20, values={name: float(np.mean(some)) for name, some in values.items()})
        journal.write("scores", step=20, values=values)
    return run


def test_a_metric_that_is_a_mean_is_compared_example_by_example_in_its_direction(make_run: MakeRun) -> None:
    draw = np.random.default_rng(5)
    right = [[float(x) for x in draw.random(60) < share] for share in (0.8, 0.3)]
    documents = list(range(NUM_EXAMPLES))
    dense, other = (record(run, np.zeros(NUM_EXAMPLES), documents) for run in (make_run(), topk(make_run, 0)))
    for run, some in zip((dense, other), right, strict=True):
        score(run, {"eval/exact_match": some})
    entry = compare_runs([dense, other], metric="eval/exact_match").groups[1].quality.examples[0]
    apart = np.subtract(right[1], right[0])
    theirs = stats.ttest_1samp(apart, 0.0)
    assert (entry.metric, entry.clusters, entry.clustered_by) == ("eval/exact_match", 60, "document")
    assert (entry.difference.mean, entry.difference.p) == pytest.approx((apart.mean(), theirs.pvalue))
    assert entry.worse_share == (apart < 0).mean() > 0.3
    (line,) = [
        line
        for line in compare_runs([dense, other], metric="eval/exact_match").groups[1].statements
        if line.subject == "examples"
    ]
    assert line.numbers[0].name == "eval/exact_match, seed 0"
    assert compare_runs([dense, other]).groups[1].quality.examples[0].metric == "loss"


def test_tasks_of_a_harness_are_compared_by_example_where_they_are_the_same_task(make_run: MakeRun) -> None:
    values = {"lm_eval/colours/acc": [1.0, 0.0] * 20}
    for number, hashes, metric in ((0, ("ab", "ab"), "lm_eval/colours/acc"), (1, ("ab", "cd"), None)):
        runs = [make_run(f"dense-{number}", loss=3.0 + number), topk(make_run, number)]
        for run, task in zip(runs, hashes, strict=True):
            score(run, values, lm_eval={"version": "0.4", "tasks": {"colours": {"hash": task}}})
        found = compare_runs(runs, metric="lm_eval/colours/acc").groups[1].quality.examples
        assert [entry.metric for entry in found] == ([metric] if metric else [])
