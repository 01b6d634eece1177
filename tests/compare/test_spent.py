"""What all steps of runs cost, in FLOPs and in seconds, each over the baseline's: one number in every output."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from sparsebp_cli.cli.summary import summary_rows
from sparsebp_cli.compare import compare_runs, render
from sparsebp_cli.compare.answer import answer_grid
from sparsebp_cli.compare.number import SECONDS, of_quartiles
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.compare.statistics import Quartiles
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_tools.release.figure import compare_here

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
    assert speed.flops == pytest.approx(20 * 0.8e9)
    assert speed.cost is not None
    assert speed.seconds_ratio is not None
    assert speed.cost.mean == pytest.approx(0.8)
    assert speed.seconds_ratio.mean == pytest.approx(seconds, rel=0.02)
    low, high = speed.seconds_ratio.shown
    assert low is not None
    assert high is not None
    assert low < seconds / 1.01 < high
    (spent,) = [grid for grid in grids(comparison) if grid.title == "Cost of all steps"]
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


def test_every_output_gives_the_same_cost_whatever_the_probes_saw(make_run: MakeRun) -> None:
    """Probes fell on batches in which the policy saves twice as much, and timed them at a tenth of dense."""
    probed = {"probe/dense_seconds": 0.2, "probe/policy_seconds": 0.02, "speed/speedup": 10.0}
    runs = [spend(make_run("plain"), 1e9, 0.1)]
    exact = {"policy": [{"name": "lossless"}], "executed": 0.1, "claimed": 0.1, "metrics": probed}
    runs.append(spend(make_run("mine", **exact), 0.61e9, 0.07))
    found = compare_runs(runs)
    (headline,) = re.findall(r"<p class=headline>(.*?)</p>", render_report(found))
    (cost,) = [grid for grid in grids(found) if grid.title == "Cost of all steps"]
    answered = answer_grid(found)
    summary = dict(summary_rows(History.load(runs[1].path), runs[1].read_plan()["recipe"], brief=True))
    said = {
        "table": cost.rows[1][2],
        "answer": answered.rows[1][answered.columns.index("cost")],
    }
    assert said == dict.fromkeys(said, "0.61")
    for text in (headline, found.groups[1].verdict, compare_here(runs[1], Plan.load(runs[1].plan_file)).verdict):
        assert "cost 0.61 of the baseline" in html.unescape(text)
        assert not re.findall(r"timed in turns|probe|-90|saving", text)
    assert summary["cost"].endswith("0.61 times dense training")
    assert json.loads(render(found, "json"))["groups"][1]["speed"]["cost"]["mean"] == pytest.approx(0.61)


def test_the_limit_is_that_of_all_steps_and_probes_give_the_time_of_a_flop(make_run: MakeRun) -> None:
    """In probes a tenth of the backward is left: 1.2 of 3 parts. All steps cost 0.8, so the probes saw rare batches."""
    topk = {"policy": [{"name": "topk", "keep": 0.1}], "exact": False, "executed": 0.1, "claimed": 0.1}
    runs = []
    for seed in range(2):
        runs.append(spend(make_run("dense", seed), 1e9, 0.1))
        probed = {"probe/dense_seconds": 0.2, "probe/policy_seconds": 0.1}
        runs.append(spend(make_run("topk", seed, metrics=probed, **topk), 0.8e9, 0.1))
    speed = compare_runs(runs).groups[1].speed
    passes = 0.8e9 / 0.9e9
    assert speed.limit == pytest.approx(1 / passes)
    per_flop = 0.5 / 0.4
    assert speed.reached == pytest.approx((1 - passes * per_flop) / (1 - passes))
    summary = dict(summary_rows(History.load(runs[1].path), runs[1].read_plan()["recipe"]))
    how = "FLOPs of all steps, and time per FLOP in 2 probes"
    speed_up = f"about {1 / passes / per_flop:.2f}x as fast as dense (estimated from {how})"
    assert summary["speed"] == f"{speed_up}; limit {1 / passes:.2f}x, if time falls in proportion to FLOPs"


def test_one_measurement_has_no_interval() -> None:
    assert of_quartiles(Quartiles(0.182, 0.18, 0.185, 2), SECONDS) == "182 ms"
    assert of_quartiles(Quartiles(0.182, 0.18, 0.185, 3), SECONDS) == "182 ms [180, 185]"
