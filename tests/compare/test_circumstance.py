"""What else than the policy may explain a difference reaches the verdict: a busy machine, lengths, data, versions."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebp_cli.compare import Group, Question, check, compare_runs
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.run import JournalWriter, RunFolder

from .conftest import MakeRun

TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
LOSSES = (3.00, 3.02, 2.98)
PROBES = {"probe/dense_seconds": 1.0, "probe/policy_seconds": 0.6}


def pair(make_run: MakeRun, **of_topk: Any) -> list[RunFolder]:
    """Three seeds of dense, and of a policy that is better by about 0.2."""
    metrics = {"metrics": PROBES | of_topk.pop("metrics", {})}
    runs = [make_run("dense", seed, loss=loss) for seed, loss in enumerate(LOSSES)]
    given = {"executed": 0.4} | TOPK | metrics | of_topk
    return runs + [make_run("topk", s, **({"loss": loss - 0.2 - s / 100} | given)) for s, loss in enumerate(LOSSES)]


def sparse(runs: list[RunFolder], question: Question | None = None) -> Group:
    return next(group for group in compare_runs(runs, question).groups if group.label == "topk")


def add(run: RunFolder, name: str, values: list[float]) -> None:
    """Log one value a step, from step 1."""
    with JournalWriter(run.path, durable=False) as journal:
        for step, value in enumerate(values, 1):
            journal.write("metrics", step=step, values={name: value})


# A busy machine


def test_on_a_busy_machine_the_verdict_gives_no_step_times(make_run: MakeRun) -> None:
    runs = pair(make_run, seconds=0.1, claimed=0.1, executed=0.1)
    assert "step time -50.0 %" in sparse(runs).verdict
    for run in runs[3:]:
        add(run, "time/step_cpu_seconds", [0.0303 * (10 if step < 3 else 1) for step in range(20)])
        add(run, "host/load", [9.8] * 20)
    group = sparse(runs)
    assert "step time -50" not in group.verdict
    told = "the machine was busy in 3 of its 3 runs (30% of the CPU time that a quiet machine gives, load 9.8 per CPU)"
    assert f"no statement about step time: {told}" in group.verdict
    assert "-40" not in group.verdict, "a probe is not the training"
    assert group.speed.reached == pytest.approx(0.4 / 0.6)
    assert group.speed.busy is not None
    found = compare_runs(runs)
    assert [trade.costs["step_seconds"] is None for trade in find_trades(found)] == [False, True]
    failures = check(found, "time/step_seconds.ratio > 9")
    assert ["time/step_seconds.ratio is not known" in failure.text for failure in failures] == [True]


@pytest.mark.parametrize(
    ("used", "load", "busy"),
    [
        ([0.098] * 20, None, False),
        ([0.19] * 20, 1.0, False),  # two threads, all the time
        ([0.13] * 20, 1.0, False),  # a policy whose kernels use two threads badly
        ([0.19] * 8 + [0.09] * 12, 1.0, True),  # something came in between
        ([0.13] * 20, 10.0, True),  # busy from the first step to the last: the load tells
    ],
)
def test_a_run_is_held_against_what_it_reaches_undisturbed(
    make_run: MakeRun, used: list[float], load: float | None, busy: bool
) -> None:
    run = make_run("dense", seconds=0.1)
    add(run, "time/step_cpu_seconds", used)
    if load is not None:
        add(run, "host/load", [load] * 20)
    assert (compare_runs([run]).groups[0].speed.busy is not None) is busy


def test_a_host_that_waits_for_a_gpu_is_not_busy(make_run: MakeRun) -> None:
    run = make_run("dense", facts={"device": "cuda"}, seconds=0.1)
    add(run, "time/step_cpu_seconds", [0.02] * 20)
    assert compare_runs([run]).groups[0].speed.busy is None


def test_on_a_busy_machine_seconds_never_stand_in_for_an_unknown_cost(make_run: MakeRun) -> None:
    runs = [make_run(seconds=4.0), make_run("other", model={"name": "other"}, seconds=1.0)]
    add(runs[0], "host/load", [5.0] * 20)
    assert compare_runs(runs).groups[1].quality.at_equal == ()


# Lengths and batches


def test_runs_of_unequal_length_are_never_plainly_better(make_run: MakeRun) -> None:
    """Twice the steps: lower at the end, and higher at the last step that both evaluated."""
    runs = [make_run("dense", s, loss=x, training={"max_steps": 10}, steps=10) for s, x in enumerate(LOSSES)]
    runs += [make_run("topk", s, loss=x - 0.4 - s / 100, **TOPK) for s, x in enumerate(LOSSES)]
    verdict = sparse(runs).verdict
    assert verdict.startswith("with 20 steps against 10 of the baseline, eval/loss is lower by 1.41 (")
    assert "; at step 10, the last step at which both groups were evaluated, eval/loss is lower by 0.41 " in verdict
    assert "better" not in verdict


def test_runs_with_other_batches_are_never_plainly_better(make_run: MakeRun) -> None:
    runs = pair(make_run, training={"per_device_train_batch_size": 16})
    verdict = sparse(runs).verdict
    assert verdict.startswith("with 16 examples a step against 8 of the baseline, eval/loss is lower by 0.21")
    assert "is better" not in verdict


def test_runs_of_one_length_are_compared_plainly(make_run: MakeRun) -> None:
    assert sparse(pair(make_run)).verdict.startswith("eval/loss is better by 0.21")


# Data, versions, code


def test_other_training_data_reach_the_verdict(make_run: MakeRun) -> None:
    verdict = sparse(pair(make_run, facts={"dataset_digest": "xyz"})).verdict
    assert "the data differ from the baseline's, which can explain the whole difference" in verdict
    assert "the data are others" not in sparse(pair(make_run)).verdict


def test_another_torch_or_transformers_reaches_the_verdict(make_run: MakeRun) -> None:
    packages = {"packages": {"torch": "2.11", "peft": ""}}
    verdict = sparse(pair(make_run, environment=packages)).verdict
    assert "torch 2.11, but 2.13 in the baseline" in verdict


def test_uncommitted_code_reaches_the_verdict(make_run: MakeRun) -> None:
    from sparsebp_cli.compare.load import load_folder

    runs = [load_folder(run) for run in pair(make_run)]
    runs[4].dirty = True
    verdict = next(group for group in compare_runs(runs).groups if group.label == "topk").verdict
    assert "1 of 6 runs had uncommitted changes in the checkout, so their code may differ" in verdict


# More saved than there is


@pytest.mark.parametrize(
    ("seconds", "is_impossible"), [((0.05, 0.055), True), ((0.05, 0.18), False), ((0.16, 0.16), False)]
)
def test_more_time_saved_than_there_is_gives_a_warning(
    make_run: MakeRun, seconds: tuple[float, float], is_impossible: bool
) -> None:
    """The policy leaves 47 % of the work; the warning needs more than the spread of the probes."""
    probed = {"probe/dense_seconds": 0.2, "probe/policy_seconds": seconds[0]}
    runs = pair(make_run, seconds=0.15, executed=0.2, claimed=0.2, metrics=probed)
    for run in runs[3:]:
        with JournalWriter(run.path, durable=False) as journal:
            for step in (15, 16):
                values = probed | {"probe/policy_seconds": seconds[1]}
                journal.write("metrics", step=step, values=values)
    impossible = [line for line in compare_runs(runs).warnings if "its probes saved" in line]
    assert bool(impossible) is is_impossible


# The test split


def test_the_test_split_is_reported_where_every_run_has_it(make_run: MakeRun) -> None:
    runs = pair(make_run, metrics={"test/loss": 3.5})
    assert compare_runs(runs).metric == "eval/loss"
    both = [make_run("dense", s, loss=x, metrics={"test/loss": x + 0.5}) for s, x in enumerate(LOSSES)]
    both += [make_run("topk", s, loss=x, **TOPK, metrics={"test/loss": x + s / 100}) for s, x in enumerate(LOSSES)]
    found = compare_runs(both)
    assert found.metric == "test/loss"
    assert sparse(both).verdict.startswith("test/loss is better by 0.49")
    assert found.groups[1].quality.at_equal[0].quality is not None  # what goes on during training is the validation's


# Forms of products


def test_runs_of_one_recipe_that_computed_in_other_forms_are_told_apart(make_run: MakeRun) -> None:
    used = ["Rows 256x32 masked"], ["Rows 256x32 used"]
    facts = [{"forms": {"text": "1 of 2 linears", "used": one, "times": []}} for one in used]
    runs = [make_run("topk", seed, facts=fact, **TOPK) for seed, fact in enumerate((facts[0], facts[0], facts[1]))]
    found = {one.name: one.values for one in compare_runs(runs).confounds}
    assert found["forms of products"] == ((used[0][0], ("topk",)), (used[1][0], ("topk",)))
    assert "forms of products" not in {one.name for one in compare_runs(runs[:2]).confounds}
