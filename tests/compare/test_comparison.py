"""Comparisons of run folders that were written by the real journal."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.cli.summary import summary_rows
from sparsebp_cli.compare import Comparison, Group, compare_runs
from sparsebp_cli.errors import RunNotFoundError, UsageError
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.run import History, JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}


def group_named(comparison: Comparison, label: str) -> Group:
    return next(group for group in comparison.groups if group.label == label)


def test_runs_that_differ_only_in_seed_form_one_group(two_groups: list[RunFolder]) -> None:
    found = compare_runs(two_groups[::-1])
    assert [(g.label, g.baseline, g.seeds) for g in found.groups] == [
        ("dense", True, (0, 1, 2, 3, 4)),
        ("topk-rows", False, (0, 1, 2, 3, 4)),
    ]
    dense, sparse = found.groups
    assert dense.quality.difference is None
    assert dense.quality.final is not None
    assert dense.quality.final.mean == pytest.approx(3.004)
    assert sparse.quality.difference is not None
    assert sparse.quality.difference.mean == pytest.approx(0.104)
    assert sparse.quality.difference.n == 5
    assert [(c.key, c.baseline, c.value) for c in sparse.changes] == [
        ("policy.0.name", "dense", "topk"),
        ("policy.0.keep", None, 0.1),
        ("policy.0.along", None, "rows"),
    ]
    assert dense.changes == ()
    assert "worse by 0.104" in sparse.verdict
    assert "step time -35." in sparse.verdict


def test_the_slow_first_steps_of_every_attempt_are_left_out(make_run: MakeRun) -> None:
    run = make_run(end=None)
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=20, environment={})
        for step in range(21, 31):
            journal.write("metrics", step=step, values={"time/step_seconds": 50.0 if step < 24 else 0.2})
        journal.write("metrics", step=30, values={"eval/loss": 2.0})
        journal.write("end", status="finished", step=30, text="")
    step = compare_runs([run]).groups[0].speed.step
    assert step is not None
    assert step.n == 17 + 7
    assert step.high < 0.21


def test_phases_speedup_and_limit_are_those_of_the_runs(two_groups: list[RunFolder]) -> None:
    found = compare_runs(two_groups)
    dense, sparse = (group.speed for group in found.groups)
    assert dense.step is not None
    assert sparse.step is not None
    assert sparse.backward is not None
    assert dense.step_ratio is None
    assert sparse.step_ratio is not None
    assert sparse.step_ratio.mean == pytest.approx(sparse.step.median / dense.step.median, rel=0.01)
    assert sparse.step_ratio.n == 5
    assert sparse.step_ratio.low is not None
    assert sparse.step_ratio.low <= sparse.step_ratio.mean
    assert sparse.backward.median == pytest.approx(0.6 * sparse.step.median)
    assert sparse.limit == pytest.approx(3 / 1.2)
    assert (sparse.reached, dense.reached) == (None, None)  # no probe was timed
    cost = found.groups[1].cost
    assert (cost.executed_flops, cost.dense_flops) == (0.2e9, 2e9)
    assert cost.claimed_flops == pytest.approx(0.2e9)
    assert (cost.peak_bytes, cost.peak_of, cost.kept_share, cost.cosine) == (1.2e9, "process", 0.5, 0.9)


@pytest.mark.parametrize("end", ["failed", "interrupted", "cancelled", None])
def test_a_run_that_did_not_finish_is_shown_with_its_reason_and_in_no_mean(
    two_groups: list[RunFolder], make_run: MakeRun, end: str | None
) -> None:
    lost = make_run("topk-rows", 9, **TOPK, end=end, text="out of memory\nmore", steps=10, loss=99.0, seconds=9.0)
    found = compare_runs([*two_groups, lost])
    sparse = group_named(found, "topk-rows")
    assert sparse.seeds == (0, 1, 2, 3, 4)
    assert sparse.states == {"finished": 5, end or "interrupted": 1}
    assert sparse.quality.final is not None
    assert sparse.quality.final.mean < 4
    assert sparse.speed.step is not None
    assert sparse.speed.step.high < 1
    line = next(run for run in found.runs if run.run_id == lost.run_id)
    assert not line.counts
    assert line.steps == 10
    assert line.reason == (f"{end}: out of memory" if end else "interrupted")
    assert "1 run did not finish, so the quality is of the other runs only" in sparse.verdict


def test_a_run_that_is_still_working_is_shown_as_running(two_groups: list[RunFolder], make_run: MakeRun) -> None:
    live = make_run("topk-rows", 9, **TOPK, end=None, steps=5)
    with live.lock("worker"):
        found = compare_runs([*two_groups, live])
    line = next(run for run in found.runs if run.run_id == live.run_id)
    assert (line.state, line.counts, line.reason) == ("running", False, "running")
    assert "survivors" not in group_named(found, "topk-rows").verdict


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_finished_run_whose_quality_is_not_finite_has_diverged(
    two_groups: list[RunFolder], make_run: MakeRun, value: float
) -> None:
    bad = make_run("topk-rows", 8, **TOPK, metrics={"eval/loss": value})
    found = compare_runs([*two_groups, bad])
    line = next(run for run in found.runs if run.run_id == bad.run_id)
    assert not line.counts
    assert line.reason == f"diverged: eval/loss is {value} after the last step"
    assert 8 not in group_named(found, "topk-rows").seeds


@pytest.mark.parametrize("values", [(5.0, math.inf), (math.nan, 3.0), (math.inf, -math.inf)])
def test_a_repeated_seed_whose_quality_is_not_finite_is_told_without_a_deviation(
    make_run: MakeRun, values: tuple[float, float]
) -> None:
    again = [make_run(metrics={"eval/loss": value}) for value in values]
    found = compare_runs([*again, make_run("dense", 1)])
    told = f"2 runs have seed 0 (eval/loss {values[0]:.5g}, {values[1]:.5g}); the comparison uses the first"
    assert any(told in warning for warning in found.warnings)


def test_of_two_finished_runs_of_one_seed_the_first_counts_and_all_values_are_told(make_run: MakeRun) -> None:
    old, new = make_run(loss=5.0), make_run(loss=3.0)
    failed = make_run(end="failed", text="no room")
    found = compare_runs([new, failed, old])
    final = found.groups[0].quality.final
    assert final is not None
    assert (final.mean, final.n) == (5.0, 1)
    told = "dense: 2 runs have seed 0 (eval/loss 5, 3, standard deviation 1.4); the comparison uses the first"
    assert f"{told}, {old.run_id}" in found.warnings
    assert {run.run_id: run.counts for run in found.runs} == {
        new.run_id: False,
        failed.run_id: False,
        old.run_id: True,
    }


def test_a_run_given_twice_is_read_once(make_run: MakeRun) -> None:
    run = make_run()
    found = compare_runs([run, run])
    assert [line.run_id for line in found.runs] == [run.run_id]
    assert found.warnings == ()


def test_the_baseline_is_the_first_group_whose_policies_are_all_exact(make_run: MakeRun) -> None:
    sparse = make_run("a", **TOPK)
    mixed = make_run("b", policy=[{"name": "dense"}, {"name": "random", "keep": 0.5}], exact=False)
    dense = make_run("c")
    assert compare_runs([sparse, mixed, dense]).groups[0].label == "c"
    assert compare_runs([sparse, mixed]).groups[0].label == "a"


def test_a_run_that_died_before_it_said_so_is_exact_when_its_installed_policy_is(make_run: MakeRun) -> None:
    queued = make_run("early", facts={"policies": []}, end="failed", steps=0)
    gone = make_run("gone", policy=[{"name": "no-such-plugin"}], facts={"policies": []}, end="failed", steps=0)
    sparse = make_run("a", **TOPK)
    found = compare_runs([sparse, gone, queued])
    assert [(g.label, g.exact) for g in found.groups] == [("early", True), ("a", False), ("gone", None)]


@pytest.mark.parametrize("by", ["name", "group", "id", "prefix"])
def test_the_baseline_can_be_named(two_groups: list[RunFolder], by: str) -> None:
    group = compare_runs(two_groups).groups[1].group
    run_id = two_groups[7].run_id
    wanted = {"name": "topk-rows", "group": group, "id": run_id, "prefix": run_id[:8]}[by]
    found = compare_runs(two_groups, baseline=wanted)
    assert found.baseline == found.groups[0].group == group
    difference = found.groups[1].quality.difference
    assert difference is not None
    assert difference.mean == pytest.approx(-0.104)
    assert "better by 0.104" in found.groups[1].verdict


def test_wrong_words_are_answered_in_one_line(two_groups: list[RunFolder]) -> None:
    with pytest.raises(UsageError) as caught:
        compare_runs(two_groups, baseline="topk-row")
    assert str(caught.value) == (
        "--baseline must name one of the runs compared (dense, topk-rows), got 'topk-row'; did you mean topk-rows?"
    )
    with pytest.raises(UsageError, match=r"got 'eval/los'; did you mean eval/loss\?$"):
        compare_runs(two_groups, metric="eval/los")
    with pytest.raises(UsageError, match=r"^there are no runs to compare$"):
        compare_runs([])
    with pytest.raises(RunNotFoundError, match="is not a plan"):
        compare_runs([RunFolder(Path("/nowhere/abc"))])


@pytest.mark.parametrize(
    ("num_seeds", "says"), [(1, "one seed: no statement about quality"), (2, "two seeds: no statement about quality")]
)
def test_under_three_seeds_nothing_is_said_about_quality(make_run: MakeRun, num_seeds: int, says: str) -> None:
    runs = [make_run(seed=seed) for seed in range(num_seeds)]
    runs += [make_run("bad", seed, **TOPK, loss=9.0) for seed in range(num_seeds)]
    found = compare_runs(runs).groups[1]
    assert found.verdict.startswith(says)
    assert "worse" not in found.verdict
    assert found.quality.difference is not None
    assert found.quality.difference.low is None


def test_identical_seeds_are_called_identical_and_noise_is_not_called_a_difference(make_run: MakeRun) -> None:
    runs = [make_run(seed=seed, loss=3.0 + seed) for seed in range(3)]
    runs += [make_run("same", seed, loss=3.0 + seed, backward={"exclude": ["x"]}) for seed in range(3)]
    runs += [make_run("noise", seed, **TOPK, loss=3.0 + seed + (0.1, -0.1, 0.02)[seed]) for seed in range(3)]
    found = compare_runs(runs)
    assert group_named(found, "same").verdict.startswith("eval/loss is identical on all 3 seeds")
    noise = group_named(found, "noise").verdict
    assert noise.startswith("no difference in eval/loss was shown")
    assert "not proof of equality" in noise
    p_values = [group.quality.difference for group in found.groups[1:]]
    assert [d.p_holm is None for d in p_values if d] == [True, True]  # one of them cannot be tested at all


@pytest.mark.parametrize(
    ("margin", "says"),
    [
        (0.2, "not worse by more than the margin of 0.2: yes;"),
        (0.11, "not worse by more than the margin of 0.11: inconclusive (about "),
        (0.05, "not worse by more than the margin of 0.05: no;"),
    ],
)
def test_a_margin_is_answered_by_yes_no_or_about_how_many_seeds_more(
    two_groups: list[RunFolder], margin: float, says: str
) -> None:
    assert says in compare_runs(two_groups, margin=margin).groups[1].verdict


def test_overlapping_step_times_are_not_called_faster(make_run: MakeRun) -> None:
    found = compare_runs([make_run(seconds=0.2), make_run("b", **TOPK, seconds=0.1995)])
    assert "step times overlap: neither is clearly faster" in found.groups[1].verdict
    slow = compare_runs([make_run("c", seconds=0.2), make_run("d", **TOPK, seconds=0.3)])
    assert "step time +50.0 % in these runs" in slow.groups[1].verdict


def test_a_policy_that_claims_to_skip_and_does_not_is_named(make_run: MakeRun) -> None:
    runs = [make_run(), make_run("honest", **TOPK, executed=0.1, claimed=0.1)]
    runs.append(make_run("boaster", **TOPK, executed=1.0, claimed=0.1, backward={"exclude": ["a"]}))
    runs.append(make_run("half", **TOPK, executed=0.5, claimed=0.1, backward={"exclude": ["b"]}))
    assert [line for line in compare_runs(runs).warnings if "estimates" in line] == [
        "boaster: estimates 10% of the dense backward FLOPs, but skips nothing (counted)",
        "half: estimates 10% of the dense backward FLOPs, but executes 50% (counted)",
    ]


def test_other_machines_packages_data_and_code_are_confounds(make_run: MakeRun) -> None:
    other = {"gpu": "H200", "driver": "595.1", "packages": {"torch": "2.12"}}
    runs = [
        make_run(provenance=Provenance(git_sha="a" * 40)),
        make_run(
            "topk-rows", **TOPK, environment=other, facts={"dataset_digest": "xyz", "threads": 2},
            provenance=Provenance(git_sha="b" * 40, git_diff="+ 1"),
        ),
    ]  # fmt: skip
    found = compare_runs(runs)
    assert {c.name for c in found.confounds} == {"threads", "dataset digest", "torch", "git commit"}
    torch = next(c for c in found.confounds if c.name == "torch")
    assert torch.values == (("2.13", ("dense",)), ("2.12", ("topk-rows",)))
    assert "uncommitted changes in the checkout were present in 1 of 2 runs" in found.warnings
    assert compare_runs(runs[:1]).confounds == ()


def test_another_value_of_a_variable_that_may_change_numbers_is_a_confound(make_run: MakeRun) -> None:
    shells: list[dict[str, Any]] = [{}, {"variables": {}}, {"variables": {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}}]
    runs = [make_run(f"run{n}", environment=shell, policy=[{"name": f"p{n}"}]) for n, shell in enumerate(shells)]
    (confound,) = (c for c in compare_runs(runs).confounds if c.name == "variables")
    # The first run is of an older version, which recorded none.
    assert confound.values == (("none", ("run1",)), ("NCCL_ALGO=Ring OMP_NUM_THREADS=2", ("run2",)))


def test_a_compiled_run_beside_an_uncompiled_one_is_a_confound(make_run: MakeRun) -> None:
    plain, compiled = make_run(), make_run("topk-rows", **TOPK, training={"compile": True})
    found = compare_runs([plain, compiled])
    confound = next(c for c in found.confounds if c.name == "torch.compile")
    assert confound.values == (("no", ("dense",)), ("yes", ("topk-rows",)))
    assert "another compilation (torch.compile), which can explain the whole difference" in found.groups[1].verdict
    same = compare_runs([make_run(training={"compile": True}), compiled])
    assert not any("compile" in line for line in (*same.warnings, *(c.name for c in same.confounds)))


def test_every_kind_of_confound_is_found_between_runs_that_have_it(make_run: MakeRun) -> None:
    machines = [
        {"gpu": gpu, "driver": driver, "cuda": cuda, "packages": {"torch": "2.13"}}
        for gpu, driver, cuda in (("H200", "590.1", "12.8"), ("H100", "595.1", "13.0"))
    ]
    facts = [{"tokens_per_step": tokens, "threads": threads} for tokens, threads in ((1024, 1), (2048, 2))]
    runs = [
        make_run(name, environment=machines[n], facts=facts[n], policy=[{"name": name}]) for n, name in enumerate("ab")
    ]
    found = {c.name: c.values for c in compare_runs(runs).confounds}
    assert found == {
        "GPU": (("H200", ("a",)), ("H100", ("b",))),
        "driver": (("590.1", ("a",)), ("595.1", ("b",))),
        "CUDA": (("12.8", ("a",)), ("13.0", ("b",))),
        "threads": (("1", ("a",)), ("2", ("b",))),
        "tokens a step": (("1024", ("a",)), ("2048", ("b",))),
    }


def test_what_runs_warned_of_themselves_is_said_once(make_run: MakeRun) -> None:
    runs = [make_run(seed=0), make_run(seed=1), make_run("b", **TOPK)]
    for run, texts in zip(runs, (["slow kernel"], ["slow kernel"], [f"text {n}" for n in range(9)]), strict=True):
        with JournalWriter(run.path) as journal:
            for text in texts:
                journal.write("note", level="warning", text=text)
            journal.write("note", level="info", text="all is well")
    warnings = compare_runs(runs).warnings
    assert warnings[-6:] == (
        "dense: slow kernel",
        *(f"b: text {n}" for n in range(4)),
        "5 more warnings are in the event logs of the runs",
    )


def test_runs_whose_steps_interleave_in_time_are_warned_about(make_run: MakeRun) -> None:
    first, second = make_run(start=1e9), make_run("b", **TOPK, start=1e9 + 3)
    assert any("ran at the same time" in line for line in compare_runs([first, second]).warnings)
    after = make_run("c", **TOPK, start=2e9)
    assert not any("at the same time" in line for line in compare_runs([first, after]).warnings)


def test_a_run_inside_the_pause_of_another_did_not_disturb_it(make_run: MakeRun) -> None:
    resumed, between = make_run(start=1e9, end="interrupted"), make_run("b", **TOPK, start=1e9 + 100)
    with JournalWriter(resumed.path) as journal:
        journal.write("attempt", from_step=20, environment={})
        journal.write("metrics", step=21, values={"time/step_seconds": 0.2, "eval/loss": 3.0})
        journal.write("end", status="finished", step=21, text="")
    assert not any("at the same time" in line for line in compare_runs([resumed, between]).warnings)


def test_classification_is_judged_by_accuracy_or_any_logged_metric(make_run: MakeRun) -> None:
    data = {"dataset": {"name": "d", "format": "classification"}}
    found = compare_runs([make_run(**data)])
    assert (found.metric, found.better) == ("eval/accuracy", "higher")
    assert compare_runs([make_run("x", **data)], metric="train/loss").metric == "train/loss"


def test_higher_is_better_is_not_confused_with_lower_is_better(make_run: MakeRun) -> None:
    data = {"dataset": {"name": "d", "format": "classification"}}
    runs = [make_run(seed=s, **data, metrics={"eval/accuracy": 0.8 + s / 100}) for s in range(3)]
    runs += [make_run("b", s, **TOPK, **data, metrics={"eval/accuracy": 0.7 + s / 100 + s / 1000}) for s in range(3)]
    verdict = compare_runs(runs, margin=0.2).groups[1].verdict
    assert "eval/accuracy is equal within the margin of 0.2, worse by 0.099" in verdict
    assert "; not worse by more than the margin of 0.2: yes" in verdict


def test_two_recipes_of_one_name_get_different_labels(make_run: MakeRun) -> None:
    found = compare_runs([make_run("x"), make_run("x", **TOPK)])
    assert [group.label for group in found.groups] == [f"x#{group.group[:4]}" for group in found.groups]


def test_runs_without_any_evaluation_are_compared_in_speed_alone(make_run: MakeRun) -> None:
    found = compare_runs([make_run(steps=9), make_run("b", **TOPK, steps=9, seconds=0.1)])
    assert found.groups[1].quality.final is None
    assert found.groups[1].verdict == "no quality to compare; step time -50.0 % in these runs."
    assert "b: no run has eval/loss after its last step" in found.warnings


def test_groups_of_which_every_run_failed_are_shown_all_the_same(make_run: MakeRun) -> None:
    found = compare_runs([make_run(end="failed"), make_run("b", **TOPK, end="failed", steps=0)])
    assert [group.states for group in found.groups] == [{"failed": 1}, {"failed": 1}]
    assert found.groups[1].verdict.startswith("no quality to compare; no step times to compare; 1 run did not finish")


def test_comparing_needs_neither_torch_nor_mlflow(two_groups: list[RunFolder]) -> None:
    code = (
        "import sys; from sparsebp_cli.compare import compare_runs, render; from sparsebp_cli.run import list_runs;"
        "render(compare_runs(list_runs()), 'json');"
        "print(sorted({'torch', 'mlflow', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_summary_of_a_run_and_the_comparison_show_the_same_cosine(make_run: MakeRun) -> None:
    run = make_run("sparse", policy=[{"name": "topk", "keep": 0.1, "along": "rows"}], exact=False)
    with JournalWriter(run.path) as journal:
        for step, cosine in ((12, 0.3595), (14, 0.644), (16, 0.7)):
            journal.write("metrics", step=step, values={"fidelity/cosine": cosine})
    ((_, told),) = [
        row for row in summary_rows(History.load(run.path), run.read_plan()["recipe"]) if row[0] == "fidelity"
    ]
    (group,) = compare_runs([run]).groups
    assert group.cost.cosine == 0.7  # of 0.3595, 0.644, 0.7, 0.9 and 0.9
    assert told == "cosine 0.7000 (medians of 5 steps)"


def test_another_version_of_a_package_with_policies_is_a_confound(make_run: MakeRun) -> None:
    runs = [
        make_run("a", seed, environment={"plugins": {"halves": version}}) for seed, version in enumerate(("1.0", "2.0"))
    ]
    runs.append(make_run("b", environment={"plugins": {"halves": "1.0", "thirds": "3.0"}}, **TOPK))
    found = {one.name: one.values for one in compare_runs(runs).confounds}
    assert found == {"halves": (("1.0", ("a", "b")), ("2.0", ("a",)))}
