"""Nothing in one output contradicts the paired verdict, and times to a value are not those of winners."""

from __future__ import annotations

import pytest

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.compare.curve_grid import curve_grid
from sparsebp_cli.compare.overview_grid import quality_grids
from sparsebp_cli.compare.statistics import paired_difference
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.run import RunFolder
from tests.compare.conftest import MakeRun

TOPK = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
RANDOM = {"policy": [{"name": "random", "keep": 0.1, "along": "rows"}], "exact": False}


@pytest.fixture
def lopsided(make_run: MakeRun) -> list[RunFolder]:
    """Dense with three hard seeds more; the policy loses each of its three pairs by about 0.02."""
    runs = [make_run("dense", seed, loss=loss) for seed, loss in enumerate((3.0, 3.01, 3.02, 3.6, 3.6, 3.6))]
    return runs + [
        make_run("topk", seed, loss=loss, seconds=0.13, claimed=0.1, **TOPK)
        for seed, loss in enumerate((3.02, 3.029, 3.041))
    ]


def test_quality_against_cost_agrees_with_the_pairs_that_a_policy_lost(
    lopsided: list[RunFolder],
) -> None:
    found = compare_runs(lopsided)
    assert "is worse by 0.02" in found.groups[1].verdict
    dense, topk = find_trades(found)
    assert dense.quality is not None
    assert topk.quality is not None
    assert topk.quality - dense.quality == pytest.approx(0.02)


def test_curves_stand_beside_each_other_over_the_shared_seeds(lopsided: list[RunFolder]) -> None:
    found = compare_runs(lopsided)
    assert found.shared_seeds == (0, 1, 2)
    grid = curve_grid(found, "eval/loss")
    last = grid.rows[-1]
    assert last[1].startswith("3.010")
    assert last[2].startswith("3.030")
    assert grid.note.endswith("Seeds that the groups share: 0, 1, 2: topk has no other seeds.")
    assert [len(found.comparable_runs(group)) for group in found.groups] == [3, 3]


def test_the_means_in_the_table_of_quality_do_not_contradict_the_difference(lopsided: list[RunFolder]) -> None:
    rows = quality_grids(compare_runs(lopsided), everything=False)[0].rows
    assert [row[2].partition(" ")[0] for row in rows] == ["3.010", "3.030"]


def test_groups_with_the_same_seeds_are_drawn_whole(two_groups: list[RunFolder]) -> None:
    found = compare_runs(two_groups)
    assert found.shared_seeds == ()
    assert [len(found.comparable_runs(group)) for group in found.groups] == [5, 5]


def test_a_group_that_shares_no_seed_with_the_baseline_is_not_ranked(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed, loss=3.0) for seed in range(3)]
    runs += [make_run("topk", seed, loss=2.0, seconds=0.1, claimed=0.1, **TOPK) for seed in range(10, 13)]
    found = compare_runs(runs)
    assert [trade.is_paired for trade in find_trades(found)] == [True, False]


def test_the_placed_qualities_are_the_paired_differences(lopsided: list[RunFolder]) -> None:
    found = compare_runs(lopsided)
    values = [{run.seed: run.quality for run in found.runs if run.group == group.group} for group in found.groups]
    expected = paired_difference(values[1], values[0])  # type: ignore[arg-type]
    assert found.groups[1].quality.difference is not None
    assert expected is not None
    assert found.groups[1].quality.difference.mean == expected.mean
