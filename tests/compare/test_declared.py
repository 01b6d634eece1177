"""A metric that a run declares is compared by its own direction and unit, without the package that computed it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from sparsebp_cli.cli.show import samples_table
from sparsebp_cli.compare import compare_runs
from sparsebp_cli.compare.gate import check
from sparsebp_cli.compare.question import Question
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import History, JournalWriter, RunFolder

from .conftest import MakeRun

# The name says the opposite: a word that is usually better lower.
DECLARED = {f"{split}/solved_error": {"unit": "tasks", "better": "higher"} for split in ("eval", "test")}
SPARSE = [{"name": "topk", "keep": 0.1, "along": "rows"}]


def make(make_run: MakeRun, name: str, seed: int, solved: float, **more: Any) -> RunFolder:
    values = {"eval/solved_error": solved - 1.0, "test/solved_error": solved}
    return make_run(name, seed, facts={"metrics": DECLARED}, metrics=values, **more)


@pytest.fixture
def runs(make_run: MakeRun) -> list[RunFolder]:
    dense = [make(make_run, "dense", seed, 10.0 + seed) for seed in range(5)]
    gains = [4.0, 5.0, 4.5, 5.5, 6.0]
    more = [make(make_run, "topk", s, 10.0 + s + gains[s], policy=SPARSE, exact=False) for s in range(5)]
    return dense + more


def test_the_declared_direction_decides_and_no_word_of_the_name(runs: list[RunFolder]) -> None:
    found = compare_runs(runs, metric="test/solved_error", margin=0.5)
    assert (found.better, found.unit, found.course) == ("higher", "tasks", "eval/solved_error")
    group = found.groups[1]
    assert group.quality.difference is not None
    assert group.quality.difference.mean == pytest.approx(5.0)
    low, high = stats.t.interval(0.95, 4, loc=5.0, scale=stats.sem([4.0, 5.0, 4.5, 5.5, 6.0]))
    assert (group.quality.difference.low, group.quality.difference.high) == pytest.approx((low, high))
    assert group.quality.not_worse is not None
    assert group.quality.not_worse.answer == "yes"
    assert found.is_gain(group, "quality")
    assert not check(found, "test/solved_error.delta.low < 0")


def test_an_option_against_the_declaration_and_two_declarations_are_refused(make_run: MakeRun) -> None:
    one = make(make_run, "dense", 0, 1.0)
    with pytest.raises(UsageError, match="--better must be higher for eval/solved_error, got 'lower'"):
        compare_runs([one], Question(metric="eval/solved_error", better="lower"))
    turned = {"eval/solved_error": {"unit": "tasks", "better": "lower"}}
    other = make_run("dense", 1, facts={"metrics": turned}, metrics={"eval/solved_error": 1.0})
    with pytest.raises(UsageError, match="declare that eval/solved_error is better when higher, others when lower"):
        compare_runs([one, other], metric="eval/solved_error")


def test_a_metric_without_a_declaration_has_the_direction_of_the_option_or_none(make_run: MakeRun) -> None:
    runs = [
        make_run(name, seed, metrics={"eval/em": score + 0.01 * seed * score}, **more)
        for name, score, more in (("dense", 0.5, {}), ("topk", 0.6, {"policy": SPARSE, "exact": False}))
        for seed in range(3)
    ]
    with pytest.raises(UsageError, match=r"cannot tell from 'eval/em' .* add --better lower or higher"):
        compare_runs(runs, Question(metric="eval/em", margin=0.01))
    assert "differs by" in compare_runs(runs, Question(metric="eval/em")).groups[1].verdict
    found = compare_runs(runs, Question(metric="eval/em", margin=0.01, better="higher"))
    assert "is better by 0.101" in found.groups[1].verdict
    assert found.groups[1].quality.not_worse is not None
    assert found.groups[1].quality.not_worse.answer == "yes"


def test_what_all_recipes_are_judged_by_is_compared(make_run: MakeRun) -> None:
    measure = {"warmup_steps": 3, "metric": "eval/solved_error"}
    runs = [make(make_run, "dense", seed, 3.0, measure=measure) for seed in range(2)]
    assert compare_runs(runs).metric == "test/solved_error"
    assert compare_runs([*runs, make(make_run, "other", 0, 3.0)]).metric == "eval/loss"


def test_generated_texts_stand_beside_their_references(make_run: MakeRun) -> None:
    run = make(make_run, "dense", 0, 1.0)
    with JournalWriter(run.path, durable=False) as journal:
        for step in (0, 5, 10, 15, 20):
            texts = {
                key: [f"{key} {n} <b> at {step}" for n in range(3)] for key in ("prompt", "reference", "prediction")
            }
            journal.write("samples", step=step, split="validation", values=texts)
        journal.write("end", status="finished", step=20, text="")
    history = History.load(run.path)
    table = samples_table(history)
    assert [*table.columns[0].cells] == ["0", "0", "10", "10", "20", "20"]
    assert [*table.columns[3].cells][-1] == "prediction 1 <b> at 20"
    found = compare_runs([run])
    assert [sample.step for sample in found.runs[0].samples] == [0, 0, 10, 10, 20, 20]
    page = render_report(found)
    assert "Generated texts" in page
    assert "prediction 1 &lt;b&gt; at 20" in page
    assert "prediction 1 <b> at 20" not in page


def test_declarations_that_are_none_are_left_out(make_run: MakeRun) -> None:
    run = make_run("dense", 0, facts={"metrics": {"eval/x": "higher"}}, metrics={"eval/x": 1.0})
    assert "metrics" not in History.load(run.path).facts
    assert History.load(run.path).find_metric("eval/x") is None
    assert math.isclose(History.load(run.path).last("eval/x") or 0.0, 1.0)
