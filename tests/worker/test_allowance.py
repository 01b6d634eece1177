"""A run ends by its limit of FLOPs at a step's end, and a resumed one goes on counting."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.recipe.composition import find_unsupported
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.worker.allowance import Allowance
from sparsebp_cli.worker.checkpoint import CheckpointFolder
from tests.worker.conftest import start, work
from tests.worker.test_resume import wait_for

PROBED = {"eval_every": 5, "eval_examples": 8, "probe_every": 5}
DENSE_STEP = 12_324_323  # FLOPs of a dense step of the tiny recipe
ROWS = [{"name": "random", "keep": 0.5, "along": "rows"}]


def test_work_is_the_sum_of_all_steps_also_after_a_resume() -> None:
    allowance = Allowance(1e9)
    allowance.spend(9e8)
    resumed = Allowance(1e9)
    resumed.load_state_dict(allowance.state_dict())
    resumed.spend(None)  # nothing was counted
    assert not resumed.exceeded
    resumed.spend(2e8)
    assert resumed.exceeded == "training.max_flops: 1.1e+09 of 1e+09 FLOPs are used"


def test_a_checkpoint_of_an_earlier_release_has_more_than_the_flops() -> None:
    allowance = Allowance(2.0)
    allowance.load_state_dict({"flops": 1.0, "dense_flops": 2.0, "steps": 1, "seconds": 3.0, "step_seconds": 3.0})
    assert allowance.state_dict() == {"flops": 1.0}


def test_a_run_with_few_flops_finishes_after_its_first_step(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training={"max_flops": 1.0}, measure=PROBED))
    assert work(run) == 0
    loaded = load_folder(run)
    assert (loaded.state, loaded.finished, loaded.steps_to_end) == (State.FINISHED, True, 1)
    text = loaded.history.ends[-1]["text"]
    assert text.startswith("training.max_flops: ")
    assert " of 1 FLOPs are used" in text
    assert (run.path / "model" / "model.safetensors").is_file()
    assert len(loaded.evaluations("eval/loss")) == 2
    assert work(run) == 0  # finished is finished
    assert len(History.load(run.path).ends) == 1


def test_a_policy_that_works_less_makes_more_steps_of_the_same_work(tiny_recipe, prepared) -> None:
    training, steps = {"max_steps": 40, "max_flops": 6 * DENSE_STEP}, {}
    for name, policy in {"dense": [], "rows": ROWS}.items():
        run = prepared(tiny_recipe(training=training, measure=PROBED, policy=policy))
        assert work(run) == 0
        steps[name] = load_folder(run).steps
    assert steps["dense"] == 6
    assert 6 < steps["rows"] < 12  # the forward is not saved


@pytest.mark.slow
def test_what_was_spent_before_an_interruption_counts_after_it(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        training={"max_steps": 4000, "max_flops": 120 * DENSE_STEP},
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
    assert 20 * DENSE_STEP <= spent["flops"] < 120 * DENSE_STEP
    assert work(run) == 0
    assert load_folder(run).steps == load_folder(straight).steps == 120
    model = Path("model") / "model.safetensors"
    assert (run.path / model).read_bytes() == (straight.path / model).read_bytes()


def test_a_limit_of_work_without_probes_is_refused(tiny_recipe) -> None:
    found = [*find_unsupported(tiny_recipe(training={"max_flops": 5.0}))]
    assert [error.text for error in found] == [
        "needs measure.probe_every, because only probes count the FLOPs of a step; got null"
    ]


def _read_spent(run: RunFolder) -> dict[str, float]:
    snapshot, _ = CheckpointFolder(run.path / "checkpoints", keep_last=2).load_newest_good()
    assert snapshot is not None
    return snapshot.rest["spent"]
