"""Frozen parameters in whole runs: what is trained changes from step to step, and nothing else of a run does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import RecipeError, UnsupportedError
from sparsebp_cli.recipe import load_recipe, refuse_unsupported
from sparsebp_cli.run import History
from sparsebp_cli.run.metric import METRICS
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA, work
from tests.worker.ranks import make_run, train_alone, train_on_two
from tests.worker.test_processes import ABSOLUTE, RELATIVE, make_recipe, weights_of

__all__ = ["make_recipe"]  # a fixture

THREE = LLAMA | {"num_hidden_layers": 3}  # one fused attention: it counts whole where it has to run at all
DROPPING = LLAMA | {"attention_dropout": 0.1, "num_hidden_layers": 3}
TURNS = {"name": "frozen", "freeze": ["*embed_tokens*"], "turn": "layers", "order": "random", "every": 2}
TOP = {"name": "frozen", "train": ["model.layers.1.mlp", "lm_head"]}


def _history(run: Any) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


@pytest.mark.always("adamw")
@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_a_killed_run_whose_layers_take_turns_resumes_identically(tiny_recipe, prepared, optim) -> None:
    recipe = tiny_recipe(
        model={"config": DROPPING},
        policy=[TURNS],
        training={"max_steps": 30, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "optim": optim},
        checkpoint={"every": 3},  # in the middle of turns, and before every layer has had its first
    )
    resume_killed(recipe, prepared)


@pytest.mark.always("turns and rows", "lora")
@pytest.mark.parametrize(
    ("policy", "sections"),
    [
        ([TURNS], {}),
        ([TURNS, {"name": "topk", "keep": 0.25}], {}),
        ([TOP, {"name": "random", "keep": 0.5}], {}),
        ([TURNS], {"backward": {"checkpointing": "full"}}),
        ([{"name": "frozen", "train": ["*layers.2*"]}], {"model": {"config": DROPPING, "lora": {"r": 4}}}),
    ],
    ids=["turns", "turns and rows", "top and rows", "checkpointing", "lora"],
)
def test_measuring_changes_no_weight_and_no_number(tiny_recipe, prepared, policy, sections) -> None:
    often = {"probe_every": 1, "fidelity_every": 1, "eval_every": 2, "eval_examples": 8}
    never = often | {"probe_every": None, "fidelity_every": None}
    shared = {"model": {"config": DROPPING}, "policy": policy, "training": {"max_steps": 5}} | sections
    measured, plain = (prepared(tiny_recipe(**shared, measure=measure)) for measure in (often, never))
    told, expected = _history(measured), _history(plain)
    ours, theirs = weights_of(measured), weights_of(plain)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    for name in expected.metrics:
        if not METRICS[name].timing:
            assert told.series(name) == expected.series(name), name
    assert set(told.series("fidelity/cosine")) == set(range(1, 6))


def test_a_run_counts_what_it_trains_over_all_steps(tiny_recipe, prepared) -> None:
    turns = TURNS | {"order": "ascending", "every": 1, "train": None, "freeze": ["*embed_tokens*", "lm_head", "*norm*"]}
    measure = {"probe_every": 1, "fidelity_every": None}
    history = _history(
        prepared(tiny_recipe(model={"config": DROPPING}, policy=[turns], training={"max_steps": 4}, measure=measure))
    )
    facts = history.facts
    assert facts["num_trainable_parameters"] == facts["num_parameters"]
    gradients = history.series("memory/gradient_bytes")
    layer = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert list(gradients.values()) == [layer] * 4
    executed = history.series("flops/backward_executed")
    assert executed[3] < executed[2] < executed[1] == executed[4]  # the further up, the shorter the backward


def _last(history: History, name: str) -> float:
    return list(history.series(name).values())[-1]


# Three equal layers, D 32, inner 64, two heads of keys for four: products of one row in a layer, and of the head.
LAYER, HEAD = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), 2 * 32 * 300
PROBED = {"probe_every": 5, "fidelity_every": None}


@pytest.mark.always("float8 lora", "turns", "tied")
@pytest.mark.parametrize(
    ("policy", "sections"),
    [
        ([{"name": "frozen", "train": ["model.layers.1"]}], {}),
        ([{"name": "frozen", "freeze": ["*layers.0*", "*q_proj*", "*norm*", "*embed*"]}], {}),
        ([{"name": "frozen", "train": ["*q_proj*"]}], {"model": {"config": THREE | {"tie_word_embeddings": True}}}),
        ([TURNS], {}),
        ([{"name": "frozen", "train": ["*layers.[12]*"]}], {"model": {"config": THREE, "lora": {"r": 4}}}),
        (
            [{"name": "frozen", "train": ["*layers.[12]*"]}],
            {"model": {"config": THREE, "float8": "emulated", "lora": {"r": 4}}},
        ),
        ([{"name": "frozen", "freeze": ["*layers.1*"]}], {"model": {"config": THREE, "float8": "emulated"}}),
        ([{"name": "frozen", "freeze": ["*layers.1*"]}, {"name": "topk", "keep": 0.25}], {}),
    ],
    ids=["layer", "here and there", "tied", "turns", "lora", "float8 lora", "float8", "with rows"],
)
def test_a_run_claims_what_a_backward_needs_and_executes_no_more_and_no_less(
    tiny_recipe, prepared, policy, sections
) -> None:
    shared = {"model": {"config": THREE}, "training": {"max_steps": 5}, "measure": PROBED}
    history = _history(prepared(tiny_recipe(policy=policy, **(shared | sections))))
    claimed, executed = _last(history, "proof/claimed_share"), _last(history, "proof/executed_share")
    assert executed == pytest.approx(claimed, rel=1e-9)
    assert 0.0 < executed < 0.95
    assert _last(history, "proof/excess_share") == 0.0
    forward, dense = _last(history, "flops/forward"), _last(history, "flops/backward_dense")
    assert _last(history, "speed/ceiling") == pytest.approx((forward + dense) / (forward + claimed * dense), rel=1e-9)
    assert _last(history, "flops/backward_executed") == pytest.approx(executed * dense, rel=1e-9)


def test_the_ceiling_of_frozen_weights_is_three_halves_without_attention(tiny_recipe, prepared) -> None:
    """With the embedding trained the gradient comes all the way down; nothing else has a wgrad."""
    policy = [{"name": "frozen", "train": ["*embed_tokens*"]}]
    sections = {"model": {"config": THREE}, "training": {"max_steps": 5}, "measure": PROBED}
    history = _history(prepared(tiny_recipe(policy=policy, **sections)))
    rows = 4 * 16
    products = rows * (3 * LAYER + HEAD)
    dense, executed = _last(history, "flops/backward_dense"), _last(history, "flops/backward_executed")
    assert dense - executed == products
    attention = dense - 2 * products
    assert _last(history, "flops/forward") == pytest.approx(
        products + attention * 2 / 5, rel=1e-4
    )  # or with rotary frequencies
    without = (3 * products) / (2 * products)
    assert _last(history, "speed/ceiling") < without == 1.5


def test_a_claim_that_is_not_kept_is_found(tiny_recipe, prepared, monkeypatch) -> None:
    """A backward that computes gradients of frozen weights all the same executes more than it needs."""
    from accelerate.state import AcceleratorState

    from sparsebp_cli.backward.kind.parameter.extension import ParameterExtension

    AcceleratorState._reset_state(reset_partial_state=True)
    run = prepared(tiny_recipe(policy=[TOP], model={"config": DROPPING}, training={"max_steps": 5}, measure=PROBED))
    monkeypatch.setattr(ParameterExtension, "enable", lambda self, enabled: None)
    train_alone([run])
    history = History.load(run.path)
    assert _last(history, "proof/excess_share") > 0.3
    assert "but 100.0% were counted" in str(history.notes)


def test_a_pattern_that_matches_nothing_ends_the_run_with_a_hint(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(policy=[{"name": "frozen", "freeze": ["model.layer.0"]}]))
    assert work(run) == 2
    text = History.load(run.path).ends[-1]["text"]
    assert "freeze: 'model.layer.0' matches no trainable parameter of the model" in text
    assert "did you mean model.layers.0?" in text


def test_two_processes_with_frozen_parameters_train_as_one_does(make_recipe, tmp_path) -> None:
    case: dict[str, Any] = {"policy": [TOP], "training": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}}
    one = make_run(make_recipe(**case), tmp_path)
    train_alone([one])
    two = {way: make_run(make_recipe(2, way, **case), tmp_path) for way in ("none", "fsdp2")}
    train_on_two(list(two.values()))
    expected, begin = (
        History.load(one.path),
        load_file(one.path / "checkpoints" / "step-00000004" / "weights.safetensors"),
    )
    for run in two.values():
        found = History.load(run.path)
        for name in ("train/loss", "train/grad_norm", "eval/loss"):
            assert found.series(name) == pytest.approx(expected.series(name), rel=RELATIVE), name
        assert found.facts["num_trainable_parameters"] == expected.facts["num_trainable_parameters"]
        assert "no probes, no fidelity" in str(found.notes)
        ours, theirs = weights_of(run), weights_of(one)
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=ABSOLUTE)
            moved = not torch.equal(tensor, begin[key])
            assert moved == (key.startswith("model.layers.1.mlp") or key == "lm_head.weight"), key


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "model: {name: austen-llama}\ntarget: {kind: local, processes: 2}\npolicy: [{name: frozen, turn: layers}]",
            r"4:17: policy.0.name: 'frozen' with a set of trained parameters that changes works in one process, got "
            "target.processes: 2",
        ),
    ],
)
def test_a_recipe_is_refused_where_it_says_what_is_not_built(tmp_path, text, error) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"version: 1\n{text}\ndataset: {{name: python-docs}}\n")
    with pytest.raises(RecipeError, match=error):
        load_recipe(file)


def test_turns_on_several_processes_are_refused_by_name(make_recipe) -> None:
    with pytest.raises(UnsupportedError, match="'frozen' with a set of trained parameters that changes works in one"):
        refuse_unsupported(make_recipe(2, policy=[TURNS]))
