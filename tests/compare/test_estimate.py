"""The interval of one model's loss over held-out examples is that of the ratio of two sums, by the bootstrap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsebp_cli.compare.statistics import FEWEST_PAIRS, summarise_clusters
from sparsebp_tools.release.interval import bound_share, estimate_mean


def run_of(values: dict[str, list[float]], scores: dict[str, list[float]] | None = None) -> Any:
    history = SimpleNamespace(examples={5: values}, test_examples={}, scores={5: scores or {}})
    return SimpleNamespace(steps=5, history=history)


def test_the_interval_of_a_loss_is_that_of_the_bootstrap_over_documents() -> None:
    random = np.random.default_rng(0)
    documents = np.repeat(np.arange(40), 5)
    targets = random.integers(1, 60, 200)
    losses = 3.0 + random.normal(0, 0.4, 40)[documents] + random.normal(0, 0.2, 200) + 0.01 * targets
    loss = float((losses * targets).sum() / targets.sum())
    values = {"loss": losses.tolist(), "targets": targets.tolist(), "documents": documents.tolist()}
    found = estimate_mean(run_of(values), "eval/loss", loss)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.mean == pytest.approx(loss)
    assert found.n == 200

    draws = []
    for _ in range(4000):
        chosen = random.integers(0, 40, 40)
        rows = (chosen[:, None] * 5 + np.arange(5)).ravel()
        draws.append((losses[rows] * targets[rows]).sum() / targets[rows].sum())
    low, high = np.quantile(draws, [0.025, 0.975])
    assert found.high - found.low == pytest.approx(high - low, rel=0.15)
    assert found.low == pytest.approx(low, abs=0.1 * (high - low))


def test_a_share_of_matches_has_the_interval_of_its_examples_and_other_numbers_none() -> None:
    matches = [1.0, 0.0, 1.0, 1.0] * 5
    found = estimate_mean(run_of({}, {"eval/exact_match": matches}), "eval/exact_match", 0.75)
    assert found is not None
    assert found.low is not None
    assert found.low < 0.75 < (found.high or 0.0)
    assert estimate_mean(run_of({}), "eval/accuracy", 0.75) is None
    assert (
        estimate_mean(run_of({}, {"eval/exact_match": matches}), "eval/exact_match", 0.5) is None
    )  # of other examples
    few: dict[str, list[float]] = {"loss": [1.0] * (FEWEST_PAIRS - 1), "targets": [1] * (FEWEST_PAIRS - 1)}
    assert estimate_mean(run_of(few), "eval/loss", 1.0) is None


def test_the_interval_of_a_loss_ends_at_zero() -> None:
    losses = [0.1] * 9 + [20.0]
    mean = sum(losses) / 10
    found = estimate_mean(run_of({"loss": losses, "targets": [1.0] * 10}), "eval/loss", mean)
    assert found is not None
    assert found.low == 0.0
    assert (found.high or 0.0) > mean


@pytest.mark.parametrize("matched", [0, 1, 7, 20])
def test_the_interval_of_a_share_is_wilsons(matched: int) -> None:
    from scipy.stats import binomtest

    values = [1.0] * matched + [0.0] * (20 - matched)
    low, high = bound_share(summarise_clusters(values, range(20)), 20)
    expected = binomtest(matched, 20).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high))


def test_a_share_of_examples_in_clusters_is_known_as_well_as_that_of_clusters_alone() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        rates = random.beta(2.0, 2.0, 30)
        values = (random.random((30, 6)) < rates[:, None]).astype(float).ravel()
        low, high = bound_share(summarise_clusters(values.tolist(), np.repeat(np.arange(30), 6).tolist()), 30)
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.99
