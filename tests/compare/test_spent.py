"""What runs have spent, in FLOPs and in seconds, each over the baseline's with its interval."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.run import JournalWriter, RunFolder

from .conftest import MakeRun


def spend(run: RunFolder, flops: float, seconds: float) -> RunFolder:
    """Give a run's steps a price and CPU seconds, which vary a little with the seed."""
    with JournalWriter(run.path, durable=False) as journal:
        journal.attempt = 1
        for step in range(1, 21):
            values = {
                "flops/step": flops,
                "flops/step_dense": 1e9,
                "flops/update_dense": 1e8,
                "time/step_cpu_seconds": seconds,
            }
            journal.write("metrics", step=step, values=values)
    return run


@pytest.mark.parametrize(("seconds", "word"), [(0.65, "differ"), (0.75, ""), (0.87, ""), (0.90, "differ")])
def test_flops_and_seconds_that_differ_by_more_than_a_tenth_are_named(
    make_run: MakeRun, seconds: float, word: str
) -> None:
    runs = []
    for seed in range(3):
        runs.append(spend(make_run("dense", seed), 1e9, 0.1 * (1 + 0.01 * seed)))
        topk = make_run("topk", seed, policy=[{"name": "topk", "keep": 0.1}], exact=False)
        runs.append(spend(topk, 0.8e9, 0.1 * seconds))
    comparison = compare_runs(runs)
    speed = next(group for group in comparison.groups if group.label == "topk").speed
    assert speed.spent_flops == pytest.approx(20 * 0.8e9)
    assert speed.spent_ratio is not None
    assert speed.seconds_ratio is not None
    assert speed.spent_ratio.mean == pytest.approx(0.8)
    assert speed.seconds_ratio.mean == pytest.approx(seconds, rel=0.02)
    low, high = speed.seconds_ratio.shown
    assert low is not None
    assert high is not None
    assert low < seconds / 1.01 < high
    (spent,) = [grid for grid in grids(comparison) if grid.title == "Spent"]
    assert [(row[0], row[4]) for row in spent.rows] == [("dense", ""), ("topk", word)]


@pytest.mark.parametrize("model", [{}, {"model": {"name": "other"}}])
@pytest.mark.parametrize(("flops", "after"), [(1e9, 20.0), (0.5e9, 10.0)])
def test_equal_cost_is_that_in_flops_whatever_probes_say(
    make_run: MakeRun, model: dict[str, Any], flops: float, after: float
) -> None:
    """In its probes topk takes half of dense's time."""
    runs = []
    for seed in range(3):
        runs.append(spend(make_run("dense", seed), 1e9, 0.1))
        topk = make_run("topk", seed, policy=[{"name": "topk", "keep": 0.1}], exact=False, **model)
        runs.append(spend(topk, flops, 0.1))
    group = compare_runs(runs).groups[1]
    (entry,) = group.quality.at_equal
    assert group.speed.relative_cost == pytest.approx(flops / 1e9)
    assert (entry.by, entry.amount) == ("cost", pytest.approx(after))
    assert entry.quality == group.quality.final
