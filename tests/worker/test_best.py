"""``checkpoint.keep_best``: the weights of the best evaluation outlive the rotation, and a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.loader import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, manifest
from sparsebp_cli.run.metric import METRICS
from sparsebp_cli.worker.best import BestEvaluation
from tests.worker.conftest import start, work

Prepare = Callable[[Recipe], RunFolder]
# Learns the few texts by heart and grows worse on the others: the best evaluation is neither the first nor the last.
OVERFIT = {"training": {"max_steps": 24, "learning_rate": 0.05}, "dataset": {"max_train_examples": 4},
           "measure": {"eval_every": 3}}  # fmt: skip


def find_best(run: RunFolder) -> int:
    values = {step: value for step, value in History.load(run.path).series("eval/loss").items() if step > 0}
    return min(values, key=lambda step: (values[step], step))


@pytest.mark.slow
def test_the_weights_of_the_best_evaluation_are_saved(tiny_recipe, prepared: Prepare) -> None:
    recipe = tiny_recipe(**OVERFIT, checkpoint={"every": 6, "keep_last": 1, "keep_best": "eval/loss"})
    run = prepared(recipe)
    assert work(run) == 0
    best = find_best(run)
    assert 0 < best < 24
    steps = [int(place.name.removeprefix("step-")) for place in (run.path / "checkpoints").iterdir()]
    assert sorted(steps) == [best, 24]
    # The same training, stopped at that step: what its checkpoint holds is what the model was at the evaluation.
    stopped = prepared(tiny_recipe(**OVERFIT, checkpoint={"every": 50, "stop_at": best}))
    assert work(stopped) == 0
    expected = load_file(stopped.path / "checkpoints" / f"step-{best:08d}" / "weights.safetensors")
    saved, last = (load_file(run.path / name / "model.safetensors") for name in ("best", "model"))
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert not all(torch.equal(saved[name], last[name]) for name in saved)
    assert manifest.find_damage(run.path / "best") == ""
    assert any(f"best/ has the weights of step {best}" in text for _, _, text in History.load(run.path).notes)


@pytest.mark.slow
def test_a_kill_after_the_best_evaluation_keeps_it(tiny_recipe, prepared: Prepare) -> None:
    recipe = tiny_recipe(**OVERFIT, checkpoint={"every": 6, "keep_last": 1, "keep_best": "eval/loss"})
    straight, broken = prepared(recipe), prepared(recipe)
    assert work(straight) == 0
    process = start(broken)
    while (
        process.is_alive() and max(History.load(broken.path).series("eval/loss"), default=0) < find_best(straight) + 3
    ):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert work(broken) == 0
    assert find_best(broken) == find_best(straight)
    assert (broken.path / "best" / "model.safetensors").read_bytes() == (
        straight.path / "best" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("name", "step"), [("eval/loss", 2), ("eval/accuracy", 3), (None, None)])
def test_the_first_of_the_best_finite_values_after_training_began_counts(name: str | None, step: int | None) -> None:
    best, worst = BestEvaluation(None if name is None else METRICS[name]), float("nan")
    for number, value in enumerate([0.1, 0.6, 0.2, 0.9, 0.2, 0.9, worst]):
        best.take(number, {"eval/loss": value, "eval/accuracy": value})
    assert best.step == step


def test_a_metric_that_is_not_measured_is_refused(tmp_path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "version: 1\nmodel: {name: austen-llama}\ndataset: {name: austen}\ncheckpoint: {keep_best: eval/accuracy}\n"
    )
    with pytest.raises(RecipeError, match=r"best: eval/accuracy is not a validation metric .*; allowed: eval/loss"):
        load_recipe(file)


def test_resume_goes_on_beyond_the_step_at_which_it_stopped(tiny_recipe, prepared: Prepare) -> None:
    from sparsebp_cli.cli.control import _pass_stop

    run = prepared(tiny_recipe(checkpoint={"every": 50, "stop_at": 4}))
    assert work(run) == 0
    _pass_stop(run)
    assert Plan.load(run.plan_file).recipe.checkpoint.stop_at is None
    assert work(run) == 0
    assert (History.load(run.path).ends[-1]["status"], History.load(run.path).ends[-1]["step"]) == ("finished", 10)
