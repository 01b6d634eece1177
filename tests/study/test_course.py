"""Studies as a user runs them: every trial is trained once, whatever happens to clients, watchers and workers."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import State, list_runs

from .conftest import STUDY, Cli, Start, Write, count_attempts, count_finishes

pytestmark = pytest.mark.slow

WIDTH = 100
ONE_RATE = STUDY.replace("[5e-4, 1e-3]", "[1e-3]")
COST = "budget: {same: cost, as: dense, steps: 20}\n"


def test_a_study_is_tuned_on_validation_and_compared_on_test(cli: Cli, write_study: Write) -> None:
    done = cli("study", write_study())
    assert done.returncode == 0, done.stderr
    assert set(count_finishes().values()) == {1}
    assert len(list_runs()) == 2 * 2 + 2 * 2
    assert done.stdout.endswith("tiny: 8 of 8 trials have finished\nnext: sparsebp compare --study tiny\n")
    assert max(map(len, done.stdout.splitlines())) <= WIDTH

    plans = [Plan.load(run.plan_file).recipe.training for run in list_runs()]
    assert {training.learning_rate for training in plans if training.seed > 0} == {1e-3}  # whose test loss is worse
    compared = json.loads(cli("compare", "--study", "tiny", "-o", "json").stdout)
    assert compared["metric"] == "test/loss"
    assert {group["label"]: group["seeds"] for group in compared["groups"]} == {"dense": [1, 2], "topk": [1, 2]}

    tuning = cli("compare", "@tiny", "--all").stdout.partition("Tuning of dense: ")[2]
    shown = [line.split() for line in tuning.splitlines() if line.startswith(("Tuning", "0.0"))]
    of_arm = [["0.0005", "3.6931"], ["0.001", "3.0000", "chosen"]]
    assert shown == [*of_arm, ["Tuning", "of", "topk:", "eval/loss"], *of_arm]


def test_what_the_store_has_is_not_trained_again_unless_asked(cli: Cli, write_study: Write) -> None:
    file = write_study(ONE_RATE)
    cli("study", file)
    before = count_attempts()
    done = cli("study", file)
    assert done.returncode == 0
    assert "4/4  done before" in done.stdout
    assert count_attempts() == before
    assert cli("study", file, "--again").returncode == 0
    assert count_attempts().total() == 2 * before.total()
    assert cli("study", file).returncode == 0  # goes on with the repetition, which is complete
    assert count_attempts().total() == 2 * before.total()


def test_a_new_arm_or_seed_trains_only_what_is_new(cli: Cli, write_study: Write) -> None:
    cli("study", write_study(ONE_RATE))
    before = count_attempts()
    more = ONE_RATE.replace("report: 1-2", "report: 1-3").replace(
        "vary:", "  half: {policy: [{name: topk, keep: 0.5}]}\nvary:"
    )
    assert cli("study", write_study(more)).returncode == 0
    after = count_attempts()
    assert {run: after[run] for run in before} == dict(before)
    assert len(after) - len(before) == 2 + 3  # a seed for each of two arms, and a new arm


def test_runs_of_another_command_are_taken_over(cli: Cli, write_study: Write, tmp_path: Path) -> None:
    file = write_study(ONE_RATE)
    rate = ("--set", "training.learning_rate=0.001")
    assert cli("run", tmp_path / "base.yaml", "--seeds", "1-2", *rate).returncode == 0
    assert cli("study", file).returncode == 0
    assert len(list_runs()) == 4
    assert set(count_attempts().values()) == {1}


def test_one_failed_trial_stops_no_other_and_gives_the_exit_code(cli: Cli, write_study: Write) -> None:
    done = cli("study", write_study(fail="topk"))
    assert done.returncode == 100
    assert "error: topk learning_rate=0.0005 seed 0 (run " in done.stderr
    assert "failed: the fake broke" in done.stderr
    states = {Plan.load(run.plan_file).recipe.name: run.state() for run in list_runs()}
    assert states == {"dense": State.FINISHED, "topk": State.FAILED}
    assert sum(count_finishes().values()) == 2 + 2


def test_a_combination_that_diverged_is_not_chosen_and_not_trained_again(cli: Cli, write_study: Write) -> None:
    file = write_study(diverge="0.001")
    done = cli("study", file)
    assert done.returncode == 0, done.stderr
    chosen = {
        Plan.load(run.plan_file).recipe.training.learning_rate for run in list_runs() if run.state() is State.FINISHED
    }
    assert chosen == {5e-4}
    before = count_attempts()
    assert cli("study", file).returncode == 0
    assert count_attempts() == before


def test_equal_cost_gives_a_cheap_arm_more_steps_and_a_longer_warm_up(cli: Cli, write_study: Write) -> None:
    done = cli("study", write_study(ONE_RATE + COST))
    assert done.returncode == 0, done.stderr
    trainings = {
        (r.name, t.max_steps, t.warmup_steps)
        for run in list_runs()
        if (t := (r := Plan.load(run.plan_file).recipe).training)
    }
    assert trainings == {("dense", 10, 4), ("topk", 10, 4), ("dense", 20, 4), ("topk", 40, 8)}
    dry = cli("study", "study.yaml", "--dry-run").stdout
    assert max(map(len, dry.splitlines())) <= WIDTH
    assert "tiny: 6 trials, 6 done, 0 to do" in dry


def test_an_arm_with_half_of_the_budget_has_half_of_the_steps_and_of_the_flops(cli: Cli, write_study: Write) -> None:
    budget = "budget: {same: cost, as: dense, steps: 40, part: {topk: 0.5}}\n"
    assert cli("study", write_study(ONE_RATE + budget)).returncode == 0
    recipes = [Plan.load(run.plan_file).recipe for run in list_runs()]
    found = {(r.name, r.training.max_steps): r.training.max_flops for r in recipes if r.training.max_steps > 10}
    assert set(found) == {("dense", 40), ("topk", 40)}
    whole, half = found["dense", 40], found["topk", 40]
    assert whole is not None
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("budget", ["{seconds: 0.2}", "{same: time, as: dense, steps: 20}"])
def test_equal_time_gives_a_fast_arm_more_steps(cli: Cli, write_study: Write, budget: str) -> None:
    assert cli("study", write_study(f"{ONE_RATE}budget: {budget}\n")).returncode == 0
    steps = {(r.name, r.training.max_steps) for run in list_runs() if (r := Plan.load(run.plan_file).recipe)}
    assert steps == {("dense", 10), ("topk", 10), ("dense", 20), ("topk", 40)}


def test_controls_that_compare_misses_are_trained_once(cli: Cli, write_study: Write) -> None:
    text = ONE_RATE + "controls: auto\nbudget: {same: steps}\n"
    done = cli("study", write_study(text))
    assert done.returncode == 0, done.stderr
    found = json.loads(cli("compare", "--study", "tiny", "-o", "json").stdout)
    kinds = {c["kind"]: c["found"] for c in found["controls"] if c["label"] == "topk"}
    assert kinds["fewer_steps"] == "dense-10-steps"
    assert kinds["smaller_batch"] == "dense-batch-4"
    assert kinds["random"] == "topk-random"
    before = count_attempts()
    assert set(before.values()) == {1}
    assert cli("study", "study.yaml").returncode == 0
    assert count_attempts() == before


def test_a_budget_under_ten_steps_is_refused_by_name(cli: Cli, write_study: Write) -> None:
    done = cli("study", write_study(more="budget: {same: cost, as: topk, steps: 12}\n"))
    assert done.returncode == 2
    assert "arm dense: the budget of 12 steps of topk allows only 6 steps of this arm" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_stops_and_the_same_command_goes_on(cli: Cli, start: Start, write_study: Write) -> None:
    file = write_study(pace="30")
    client = start("study", file)
    _wait_for(lambda: any(count_attempts().values()))
    client.send_signal(signal.SIGINT)
    assert client.wait(60) == 130
    assert not any(run.is_locked("worker") or run.is_locked("target") for run in list_runs())
    assert cli("study", file).returncode == 0
    assert len(list_runs()) == 8
    assert set(count_finishes().values()) == {1}


def test_two_clients_at_once_start_nothing_twice(start: Start, write_study: Write) -> None:
    file = write_study(pace="5")
    clients = [start("study", file), start("study", file)]
    assert [client.wait(300) for client in clients] == [0, 0]
    assert len(list_runs()) == 8
    assert set(count_attempts().values()) == {1}
    assert set(count_finishes().values()) == {1}


def _wait_for(condition: object) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if callable(condition) and condition():
            return
        time.sleep(0.05)
    pytest.fail("nothing happened for two minutes")
