"""A run in segments: the weights of the plain loop, fewer bytes saved, and figures that compare like with like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, metric
from tests.worker.conftest import LLAMA, work
from tests.worker.test_training import GPT2, TRAINING, assert_same_weights, plain_loop

DEEP = {"llama": LLAMA | {"num_hidden_layers": 4}, "gpt2": GPT2 | {"n_layer": 4}}
ROWS = [{"name": "random", "keep": 0.5}]
PROBING = {"eval_every": 5, "eval_examples": 8, "probe_every": 2, "fidelity_every": 2, "warmup_steps": 1}


def _run(recipe: Recipe, prepared: Callable[[Recipe], RunFolder]) -> tuple[RunFolder, History]:
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return run, History.load(run.path)


def _recipe(make: Callable[..., Recipe], family: str = "llama", **sections: Any) -> Recipe:
    model = {"config": DEEP[family], "tokenizer": make().model.tokenizer}
    recipe = make(**sections)
    return recipe.model_copy(update={"model": recipe.model.model_validate(model)})


@pytest.mark.always("llama")
@pytest.mark.parametrize("family", DEEP)
def test_weights_equal_a_plain_loop_bitwise_while_probes_are_taken(tiny_recipe, prepared, family) -> None:
    """Accumulation, clipping, dropout and tied embeddings (gpt2), a schedule, and probes between the steps."""
    torch.set_num_threads(1)
    recipe = _recipe(tiny_recipe, family, training=TRAINING, backward={"segments": 2}, measure=PROBING)
    run, history = _run(recipe, prepared)
    assert_same_weights(run, plain_loop(recipe))
    assert "overclaim" not in history.facts
    assert [value for _, value in history.metrics[metric.RELATIVE_ERROR.name].values()] == [0.0] * 6


def test_dense_and_policy_are_compared_in_the_same_segments(tiny_recipe, prepared) -> None:
    found = {}
    for segments in (None, ["model.layers.0", "model.layers.3"]):
        sections = {
            "policy": ROWS,
            "backward": {"segments": segments},
            "measure": PROBING,
            "training": {"max_steps": 3},
        }
        _, found[segments is None] = _run(_recipe(tiny_recipe, **sections), prepared)
    whole, cut = found[True], found[False]
    assert "overclaim" not in cut.facts

    def first(history: History, name: str) -> float:
        return min(history.metrics[name].items())[1][1]

    assert first(cut, metric.SAVED_BYTES.name) < 0.5 * first(whole, metric.SAVED_BYTES.name)
    assert first(cut, metric.DENSE_SAVED_BYTES.name) < 0.5 * first(whole, metric.DENSE_SAVED_BYTES.name)
    again = first(cut, metric.BACKWARD_DENSE.name) - first(whole, metric.BACKWARD_DENSE.name)
    forward = first(whole, metric.FORWARD_FLOPS.name)
    assert 0.5 * forward < again < forward  # three of four layers, without the head
    assert first(cut, metric.LIMIT.name) < first(whole, metric.LIMIT.name)  # what is run again is saved by none
    assert first(cut, metric.COSINE.name) == first(whole, metric.COSINE.name)


def test_two_processes_give_the_weights_that_they_give_without_segments(tiny_recipe, prepared) -> None:
    weights = []
    for segments in (None, 3):
        sections = {"training": {"max_steps": 4}, "target": {"threads": 1, "device": "cpu", "processes": 2}}
        recipe = _recipe(
            tiny_recipe, "gpt2", backward={"segments": segments}, measure={"fidelity_every": None}, **sections
        )
        run, _ = _run(recipe, prepared)
        weights.append(load_file(run.path / "model" / "model.safetensors"))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_what_a_model_cannot_be_cut_into_ends_the_run_with_one_line(tiny_recipe, prepared) -> None:
    run = prepared(_recipe(tiny_recipe, backward={"segments": 5}))
    assert work(run) == UsageError.exit_code
    assert "segments must be a number from 1 to 4 (the number of layers) or a list of module names, got 5" in str(
        History.load(run.path).ends[-1]
    )


def test_sharded_weights_are_refused_before_the_run_starts(tiny_recipe) -> None:
    target = {"device": "cpu", "processes": 2, "sharding": "fsdp2"}
    with pytest.raises(UnsupportedError, match=r"backward.segments: 2 is not supported with target.sharding: fsdp2"):
        refuse_unsupported(tiny_recipe(backward={"segments": 2}, target=target))
