"""``training.early_stopping_patience``: a run ends when its evaluations grow no better."""

from __future__ import annotations

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe.loader import load_recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.metric import EVAL_ACCURACY, EVAL_LOSS
from sparsebp_cli.worker.best import BestEvaluation
from tests.worker.conftest import work

# Learns the few texts by heart and grows worse on the others.
OVERFIT = {
    "dataset": {"max_train_examples": 4, "eval_fraction": 0.1},
    "measure": {"eval_every": 3},
    "checkpoint": {"every": 6, "keep_best": "eval/loss"},
}


def train(run: RunFolder) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def test_a_run_ends_after_so_many_evaluations_that_are_no_better(tiny_recipe, prepared) -> None:
    training = {"max_steps": 300, "learning_rate": 0.05, "early_stopping_patience": 2}
    run = prepared(tiny_recipe(**OVERFIT, training=training))
    history = train(run)
    losses = history.series("eval/loss")
    last, best = max(losses), min((step for step in losses if step), key=lambda step: losses[step])
    assert last == best + 6 < 300
    assert (run.path / "best" / "model.safetensors").exists()
    assert any("2 evaluations in a row did not improve" in text for _, _, text in history.notes)
    # What a last step measures is there: the loss of each example.
    assert history.examples[last]["loss"]
    # Stopped before its end and resumed, it ends at the same step.
    checkpoint = OVERFIT["checkpoint"] | {"stop_at": best + 4}
    halted = prepared(tiny_recipe(**OVERFIT | {"checkpoint": checkpoint}, training=training))
    assert work(halted) == 0
    plan = (halted.path / "plan.json").read_text()
    (halted.path / "plan.json").write_text(plan.replace(f'"stop_at": {best + 4}', '"stop_at": null'))
    assert train(halted).series("eval/loss") == losses


@pytest.mark.parametrize(
    ("metric", "values", "ends"),
    [
        (EVAL_LOSS, [3.0, 2.0, 2.0, 2.5], 4),  # an equal one is no better
        (EVAL_LOSS, [3.0, 2.5, 2.6, 2.0, 2.1, 2.2], 6),
        (EVAL_ACCURACY, [0.1, 0.2, 0.1, float("nan")], 4),
        (EVAL_LOSS, [float("nan"), float("nan")], 2),
        (EVAL_LOSS, [3.0, 2.9, 2.8, 2.7], None),
    ],
)
def test_evaluations_that_are_no_better_are_counted_from_the_best(metric, values, ends) -> None:
    best = BestEvaluation(metric, patience=2)
    ended = [
        step for step, value in enumerate(values, 1) if not best.take(step, {metric.name: value}) and best.end_reason
    ]
    assert ended[:1] == ([ends] if ends else [])
    best.take(len(values) + 1, {"train/loss": 0.0})  # another metric counts nothing
    assert best.since == (2 if ends else 0)


def test_a_patience_without_a_metric_is_refused(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    text = "version: 1\nname: a\nmodel: {name: austen-llama}\ndataset: {name: austen}\n"
    file.write_text(f"{text}training: {{early_stopping_patience: 3}}\n")
    with pytest.raises(
        RecipeError, match=r"a.yaml:5:\d+: training.early_stopping_patience: needs checkpoint.keep_best"
    ):
        load_recipe(file, [])
