"""Nothing in one output contradicts the paired verdict, and times to a value are not those of winners."""

from __future__ import annotations

import pytest

from sparsebp_cli.compare import Comparison, Question, View, compare_runs, table
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.overview_grid import quality_grids
from sparsebp_cli.compare.statistics import paired_difference
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.compare.view import view_grid
from sparsebp_cli.run import JournalWriter, RunFolder
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
    grid = view_grid(found, View("eval/loss"))
    last = grid.rows[-1]
    assert last[1].startswith("3.010")
    assert last[2].startswith("3.030")
    assert grid.note.endswith("Seeds that the groups share: 0, 1, 2: topk has no other seeds.")
    assert [len(found.comparable_runs(group)) for group in found.groups] == [3, 3]


def test_the_means_in_the_table_of_quality_do_not_contradict_the_difference(lopsided: list[RunFolder]) -> None:
    rows = _quality_grids(compare_runs(lopsided))[0].rows
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


def with_curve(make_run: MakeRun, name: str, seed: int, curve: dict[int, float], **more: object) -> RunFolder:
    """A run of 100 steps of a tenth of a second whose evaluations are these alone."""
    run = make_run(name, seed, steps=0, end=None, training={"max_steps": 100}, **more)
    with JournalWriter(run.path, durable=False) as journal:
        journal.attempt = 1
        for step in range(1, 101):
            values = {"time/step_seconds": 0.1}
            journal.write("metrics", step=step, values=values | ({"eval/loss": curve[step]} if step in curve else {}))
        journal.write("end", status="finished", step=100, text="")
    return run


def falling(end: float, every: int) -> dict[int, float]:
    """From 4 to a value, in a straight line over 100 steps."""
    return {step: 4.0 - (4.0 - end) * step / 100 for step in range(every, 101, every)}


def test_time_to_a_value_is_not_compared_where_most_runs_never_reached_it(make_run: MakeRun) -> None:
    runs = [with_curve(make_run, "dense", seed, falling(3.1 - 0.001 * seed, 10)) for seed in range(10)]
    for seed in range(10):
        curve = falling(2.4 if seed < 3 else 3.5, 10)
        runs.append(with_curve(make_run, "topk", seed, curve, **TOPK))
    found = compare_runs(runs, Question(target=3.2))
    dense, topk = (group.quality.reach for group in found.groups)
    assert dense is not None
    assert topk is not None
    assert (dense.reached, dense.of, dense.censored) == (10, 10, False)
    assert (topk.reached, topk.of, topk.ratio, topk.seconds, topk.censored) == (3, 10, None, None, True)
    assert topk.at_least_steps == pytest.approx((3 * 50 + 7 * 100) / 10)
    printed = " ".join(str(grid) for grid in table(found))
    assert printed
    grid = next(g for g in _quality_grids(found) if g.title.startswith("Time to"))
    assert grid.rows[1] == ("topk", "3 of 10", "over 85", "over 8.50 s", "not compared")


def test_runs_that_diverged_did_not_reach_the_value_either(make_run: MakeRun) -> None:
    runs = [with_curve(make_run, "dense", seed, falling(3.0, 10)) for seed in range(5)]
    for seed in range(5):
        curve = falling(2.9, 10) | ({100: float("nan")} if seed else {})
        runs.append(with_curve(make_run, "topk", seed, curve, **TOPK))
    reach = compare_runs(runs, Question(target=3.2)).groups[1].quality.reach
    assert reach is not None
    assert (reach.reached, reach.of, reach.ratio) == (1, 5, None)


def test_evaluating_ten_times_as_often_gains_nothing(make_run: MakeRun) -> None:
    runs = [with_curve(make_run, "dense", seed, falling(3.0 - 0.001 * seed, 50)) for seed in range(3)]
    runs += [with_curve(make_run, "topk", seed, falling(3.0 - 0.001 * seed, 5), **TOPK) for seed in range(3)]
    found = compare_runs(runs, Question(target=3.7))
    dense, topk = (group.quality.reach for group in found.groups)
    assert dense is not None
    assert topk is not None
    assert dense.steps == topk.steps
    assert topk.ratio is not None
    assert topk.ratio.mean == pytest.approx(1.0)


def test_a_longer_run_keeps_its_evaluations_beyond_the_end_of_the_others(make_run: MakeRun) -> None:
    short = with_curve(make_run, "dense", 0, {step: value for step, value in falling(3.0, 20).items() if step <= 60})
    long = with_curve(make_run, "topk", 0, falling(3.0, 10), **TOPK)
    reach = compare_runs([short, long], Question(target=3.05)).groups[1].quality.reach
    assert reach is not None
    assert reach.reached == 1


def test_the_placed_qualities_are_the_paired_differences(lopsided: list[RunFolder]) -> None:
    found = compare_runs(lopsided)
    values = [{run.seed: run.quality for run in found.runs if run.group == group.group} for group in found.groups]
    expected = paired_difference(values[1], values[0])  # type: ignore[arg-type]
    assert found.groups[1].quality.difference is not None
    assert expected is not None
    assert found.groups[1].quality.difference.mean == expected.mean


def _quality_grids(found: Comparison) -> list[Grid]:
    return quality_grids(found, everything=False)
