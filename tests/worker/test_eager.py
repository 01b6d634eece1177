"""Runs whose parameters are updated inside the backward: the same training, told truly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.recipe import load_recipe, refuse_unsupported
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.run.metric import METRICS
from tests.chaos.kill import outcome
from tests.worker.conftest import LLAMA, start, work
from tests.worker.test_resume import wait_for

RECIPES = Path(__file__).parents[2] / "recipes"
EXACT = {"update": "eager", "eager_clip": "exact"}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def weights(run: RunFolder) -> dict[str, bytes]:
    tensors = load_file(run.path / "model" / "model.safetensors")
    return {name: tensor.view(-1).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.always("policy-autocast", "frozen-in-turn")
@pytest.mark.parametrize(
    ("model", "training", "more"),
    [
        (LLAMA, {"max_grad_norm": 0.5, "warmup_steps": 3}, {}),
        (GPT2, {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}, {"backward": {"checkpointing": "full"}}),
        (LLAMA, {"max_grad_norm": None, "optim": "apollo-mini"}, {"backward": {"segments": 2}}),
        (LLAMA, {"max_grad_norm": 0.5, "mixed_precision": "bf16"}, {"policy": [{"name": "random", "keep": 0.5}]}),
        (LLAMA, {"max_grad_norm": 0.5}, {"policy": [{"name": "frozen", "turn": "layers"}]}),
    ],
    ids=["llama", "gpt2-accumulated-checkpointed", "apollo-mini-segments", "policy-autocast", "frozen-in-turn"],
)
def test_an_eager_run_ends_with_the_weights_and_numbers_of_the_deferred_one(
    tiny_recipe: Any, prepared: Any, model: dict[str, Any], training: dict[str, Any], more: dict[str, Any]
) -> None:
    runs = []
    for is_eager in (False, True):
        clip = {} if training["max_grad_norm"] is None else {"eager_clip": "exact"}
        backward = more.get("backward", {}) | ({"update": "eager"} | clip if is_eager else {})
        recipe = tiny_recipe(
            model={"config": model},
            training=training,
            measure={"probe_every": 4, "fidelity_every": 4},
            **(more | {"backward": backward}),
        )
        runs.append(prepared(recipe))
        assert work(runs[-1]) == 0, (runs[-1].path / "worker.log").read_text()
    assert weights(runs[0]) == weights(runs[1])
    histories = [History.load(run.path) for run in runs]
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss", "fidelity/cosine"):
        assert histories[0].series(name) == histories[1].series(name), name
    assert {n for n in histories[0].metrics if n in METRICS} == {n for n in histories[1].metrics if n in METRICS}


@pytest.mark.always("parameter")
@pytest.mark.parametrize("clip", ["previous", "parameter"])
def test_a_killed_eager_run_goes_on_bit_by_bit(tiny_recipe: Any, prepared: Any, clip: str) -> None:
    recipe = tiny_recipe(
        training={"max_steps": 24, "max_grad_norm": 0.5, "optim": "apollo"},
        backward={"update": "eager", "eager_clip": clip},
        checkpoint={"every": 2},
    )
    straight, killed = prepared(recipe), prepared(recipe)
    assert work(straight) == 0, (straight.path / "worker.log").read_text()
    process = start(killed)
    wait_for(killed, lambda: len(History.load(killed.path).series("train/loss")) > 5, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert work(killed) == 0, (killed.path / "worker.log").read_text()
    assert outcome(killed) == outcome(straight)


def test_a_run_holds_fewer_bytes_of_gradients_at_its_peak(tiny_recipe: Any, prepared: Any) -> None:
    peaks = []
    for backward in ({}, {"update": "eager"}):
        run = prepared(tiny_recipe(training={"max_grad_norm": None}, backward=backward, measure={"probe_every": 4}))
        assert work(run) == 0, (run.path / "worker.log").read_text()
        peaks.append(History.load(run.path).last("memory/gradient_bytes"))
    assert peaks[1] < peaks[0] / 3


def test_an_eager_run_that_diverges_says_how_much_was_updated(tiny_recipe: Any, prepared: Any) -> None:
    training = {"optim": "sgd", "learning_rate": 1e30, "max_grad_norm": None, "max_steps": 50}
    run = prepared(tiny_recipe(training=training, checkpoint={"every": 1}, backward={"update": "eager"}))
    assert work(run) == 3  # diverged
    assert run.state() is State.FAILED
    assert "updated" in History.load(run.path).ends[-1]["text"]
    newest = load_file(max((run.path / "checkpoints").glob("step-*")) / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())


def test_several_processes_are_refused_by_name(tiny_recipe: Any) -> None:
    recipe = tiny_recipe(backward=EXACT, target={"kind": "local", "processes": 2})
    with pytest.raises(UnsupportedError, match=r"backward.update: eager works in one process, got target.processes: 2"):
        refuse_unsupported(recipe)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["backward.update=eager"], "needs backward.eager_clip: parameter, previous or exact"),
        (["backward.update=eager"], "max_grad_norm: 1.0, the default, needs backward.eager_clip"),
        (["backward.eager_clip=exact"], "backward.eager_clip: exact needs backward.update: eager, got deferred"),
        (
            ["backward.update=eager", "backward.eager_clip=exact", "training.max_grad_norm=null"],
            "backward.eager_clip: exact has no effect with training.max_grad_norm: null: give a number",
        ),
        (
            ["backward.update=eager", "backward.eager_clip=exact", "backward.sites=nodes"],
            "eager_clip: exact needs two backward passes over one graph",
        ),
        (["backward.update=eagre"], "did you mean eager"),
        (["training.optim=apolo"], "did you mean apollo"),
    ],
)
def test_what_an_eager_recipe_lacks_is_told_before_anything_starts(changes: list[str], text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPES / "start" / "python-docs.yaml", changes)
    assert text in str(caught.value)
