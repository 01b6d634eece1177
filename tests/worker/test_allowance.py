"""A run ends by its limits of time and work at a step's end, and a resumed one goes on counting."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.recipe.composition import find_unsupported
from sparsebp_cli.recipe.schema import TrainingSection
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.run.metric import STEP_SECONDS
from sparsebp_cli.worker.allowance import Allowance
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from tests.worker.conftest import start, work
from tests.worker.test_resume import wait_for

PROBED = {"eval_every": 5, "eval_examples": 8, "probe_every": 5}
ROWS = [{"name": "random", "keep": 0.5, "along": "rows"}]


def test_time_is_the_sum_of_the_steps_and_a_traced_one_counts_as_the_last() -> None:
    allowance = Allowance.of(TrainingSection(max_seconds=4.0))
    for seconds in (1.0, 1.5, None):
        assert not allowance.exceeded
        allowance.spend(seconds, None, None)
    assert allowance.exceeded == "training.max_seconds: 4 is reached, with 4 s of steps"


def test_work_is_the_sum_of_prices_in_mean_dense_steps_also_after_a_resume() -> None:
    allowance = Allowance.of(TrainingSection(max_cost=2.0))
    allowance.spend(9.0, 30.0, 60.0)
    allowance.spend(9.0, 30.0, 40.0)
    assert allowance.cost == pytest.approx(60.0 / 50.0)
    resumed = Allowance.of(TrainingSection(max_cost=2.0))
    resumed.load_state_dict(allowance.state_dict())
    resumed.spend(9.0, None, None)  # nothing was counted
    assert not resumed.exceeded
    resumed.spend(9.0, 40.0, 50.0)
    assert "max_cost: 2 is reached, with the work of 2 dense steps" in resumed.exceeded


def test_a_limit_of_flops_is_absolute() -> None:
    allowance = Allowance.of(TrainingSection(max_flops=1e9))
    allowance.spend(1.0, 9e8, 5e8)
    assert not allowance.exceeded
    allowance.spend(1.0, 2e8, 5e8)
    assert allowance.exceeded == "training.max_flops: 1e+09 is reached, with 1.1e+09 FLOPs"


def test_without_a_limit_nothing_that_differs_between_runs_is_in_a_checkpoint() -> None:
    allowance = Allowance.of(TrainingSection())
    allowance.spend(9.0, 1.0, 2.0)
    assert allowance.state_dict() == {"flops": 1.0, "dense_flops": 2.0, "steps": 1}
    limited = Allowance.of(TrainingSection(max_seconds=3.0))
    limited.load_state_dict(allowance.state_dict())
    assert limited.seconds == 0.0


def test_a_run_without_time_finishes_after_its_first_step(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training={"max_seconds": 1e-9}))
    assert work(run) == 0
    loaded = load_folder(run)
    assert (loaded.state, loaded.finished, loaded.steps_to_end) == (State.FINISHED, True, 1)
    assert loaded.history.ends[-1]["text"].startswith("training.max_seconds: 1e-09 is reached")
    assert (run.path / "model" / "model.safetensors").is_file()
    assert len(loaded.evaluations("eval/loss")) == 2
    assert work(run) == 0  # finished is finished
    assert len(History.load(run.path).ends) == 1


def test_a_policy_that_works_less_makes_more_steps_of_the_same_work(tiny_recipe, prepared) -> None:
    training, steps = {"max_steps": 40, "max_cost": 6.0}, {}
    for name, policy in {"dense": [], "rows": ROWS}.items():
        run = prepared(tiny_recipe(training=training, measure=PROBED, policy=policy))
        assert work(run) == 0
        steps[name] = load_folder(run).steps
    assert steps["dense"] == 6
    assert 6 < steps["rows"] < 12  # the forward is not saved


@pytest.mark.slow
def test_what_was_spent_before_an_interruption_counts_after_it(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        training={"max_steps": 4000, "max_cost": 120.0, "max_seconds": 3600.0},
        measure=PROBED | {"eval_every": 4000},
        checkpoint={"every": 9},
    )
    straight, run = prepared(recipe), prepared(recipe)
    assert work(straight) == 0
    process = start(run)
    wait_for(run, lambda: len(History.load(run.path).series("train/loss")) >= 20, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 143
    spent = _read_spent(run)
    seconds = History.load(run.path).series(STEP_SECONDS.name)
    assert 20 <= spent["steps"] < 120
    assert spent["seconds"] == pytest.approx(sum(seconds.values()), rel=0.2)  # one step was traced
    assert work(run) == 0
    assert load_folder(run).steps == load_folder(straight).steps == 120
    model = Path("model") / "model.safetensors"
    assert (run.path / model).read_bytes() == (straight.path / model).read_bytes()


@pytest.mark.parametrize("limit", ["max_cost", "max_flops"])
def test_a_limit_of_work_without_probes_is_refused(tiny_recipe, limit) -> None:
    found = [*find_unsupported(tiny_recipe(training={limit: 5.0}))]
    assert [error.text for error in found] == [
        "needs measure.probe_every, because only probes count the FLOPs of a step; got null"
    ]


def _read_spent(run: RunFolder) -> dict[str, float]:
    snapshot, _ = CheckpointFolder(run.path / "checkpoints", keep_last=2).load_newest_good()
    assert snapshot is not None
    return snapshot.rest["spent"]
