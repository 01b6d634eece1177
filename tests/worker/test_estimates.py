"""Runs without a backward: what they count, and that a killed one ends as if left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History, RunFolder, metric
from tests.chaos.kill import resume_killed
from tests.worker.conftest import work

SECTIONS: dict[str, Any] = {
    "policy": [{"name": "mezo", "scale": 1e-2}],
    "training": {
        "max_steps": 6,
        "optim": "sgd",
        "max_grad_norm": None,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-4,
    },
}


def read(run: RunFolder) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def test_a_run_counts_two_forwards_no_backward_and_nothing_saved(tiny_recipe: Any, prepared: Any) -> None:
    measure = {"probe_every": 3, "fidelity_every": 3, "fidelity_draws": 3, "warmup_steps": 0}
    history = read(prepared(tiny_recipe(**SECTIONS, measure=measure)))
    dense = read(prepared(tiny_recipe(**(SECTIONS | {"policy": [{"name": "dense"}]}), measure=measure)))

    def last(which: metric.Metric, of: History = history) -> float:
        return list(of.series(which.name).values())[-1]

    assert last(metric.FORWARD_FLOPS) == 2.0 * last(metric.FORWARD_FLOPS, dense)
    assert last(metric.BACKWARD_EXECUTED) == last(metric.SAVED_BYTES) == 0.0
    assert last(metric.BACKWARD_DENSE) == last(metric.BACKWARD_EXECUTED, dense) > 0.0
    assert last(metric.EXECUTED_SHARE) == last(metric.CLAIMED_SHARE) == last(metric.EXCESS_SHARE) == 0.0
    assert last(metric.LIMIT) == pytest.approx(1.5, abs=0.1)  # two forwards for three
    assert abs(last(metric.COSINE)) < 0.2
    assert last(metric.GRADIENT_BYTES) == last(metric.GRADIENT_BYTES, dense)


def test_a_killed_run_ends_as_if_left_alone(tiny_recipe: Any, prepared: Any) -> None:
    training = SECTIONS["training"] | {"max_steps": 20}
    recipe = tiny_recipe(**(SECTIONS | {"training": training}), checkpoint={"every": 2})
    resume_killed(recipe, prepared, after=(3,))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("policy: [mezo, infobatch]\n", "in one training is not supported"),
        ("policy: [mezo]\nbackward: {checkpointing: full}\n", "nothing to compute again"),
        ("policy: [mezo]\ntarget: {processes: 2}\n", "'mezo' works in one process, got target.processes: 2"),
        ("policy: [mezo]\nmodel: {float8: emulated}\n", "is not supported: the policy shifts weights by less"),
    ],
)
def test_a_recipe_with_what_is_not_built_is_refused(more: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    model = "" if "model" in more else "model: {config: {model_type: llama}, tokenizer: none}\n"
    more = more.replace("{float8", "{config: {model_type: llama}, tokenizer: none, float8")
    file.write_text(f"version: 1\n{model}dataset: {{name: austen}}\ntraining: {{max_steps: 1}}\n{more}")
    with pytest.raises(RecipeError) as told:
        load_recipe(file)
    assert text in str(told.value)
