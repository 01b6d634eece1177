"""What a recipe would take is what it takes: the whole way, at several depths, and from a config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.errors import DataError, PolicyError, UnsupportedError
from sparsebp_cli.plan import make_plan
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.model import build_tokenizer
from sparsebp_tools.forecast.depth import DEPTHS, extend
from sparsebp_tools.forecast.material import gather_material
from sparsebp_tools.forecast.measure import forecast
from sparsebp_tools.forecast.record import Forecast, ForecastRequest
from sparsebp_tools.forecast.step import Rehearsal, make_order

# Of peft.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def _write(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "version": 1,
        "name": "made",
        "model": {"name": str(folder / "model")},
        "dataset": {"name": "somebody/elsewhere", "max_seq_length": 32},
        "training": {"max_steps": 10, "per_device_train_batch_size": 4},
        "measure": {"probe_every": None, "fidelity_every": None},
    }
    for key, value in changes.items():
        content[key] = content.get(key, {}) | value if isinstance(value, dict) and key != "policy" else value
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(content))
    return file


def _forecast(file: Path, *, remedies: bool = False, gpu: bool = True) -> Forecast:
    plan = make_plan(load_recipe(file), file)
    request = ForecastRequest(plan=plan, gpu=gpu, capacity_bytes=10**9, flops_per_second=1e9, remedies=remedies)
    return forecast(request, lambda *_: None)


def _recipe(file: Path) -> Recipe:
    return make_plan(load_recipe(file), file).recipe


def test_a_config_alone_is_enough_and_the_batch_is_then_full(tmp_path: Path) -> None:
    found = _forecast(_write(tmp_path))
    step = found.policy
    weights = 512 * 32 * 2 + 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert (step.num_parameters, step.num_trained) == (weights, weights)
    assert step.peak.optimizer == pytest.approx(2 * 4 * weights, rel=0.01)
    assert step.gradient_bytes == 4 * weights
    assert (found.batch.examples, found.batch.length, found.batch.trained_share) == (4, 32, 1.0)
    assert not found.batch.is_read
    tokens = 4 * 32
    products = 6 * tokens * (weights - 512 * 32 - 5 * 32) + 7 * 2 * 2 * 4 * 32 * 32 * 32 // 1
    assert step.pass_flops == pytest.approx(products, rel=0.05)
    assert found.hours(step) == pytest.approx((step.pass_flops + step.update_flops) * 10 / 1e9 / 3600)


@pytest.mark.slow
def test_changes_that_need_less_are_tried_exact_ones_first(tmp_path: Path) -> None:
    found = _forecast(_write(tmp_path), remedies=True)
    changes = {" ".join(one.changes): one for one in found.remedies}
    full = changes["backward.checkpointing=full"]
    assert full.step is not None
    assert full.step.peak.total < found.policy.peak.total
    assert full.step.pass_flops > 1.1 * found.policy.pass_flops
    exact = [one.is_exact for one in found.remedies]
    assert exact == sorted(exact, reverse=True)
    lora = next(one for name, one in changes.items() if name.startswith("model.lora"))
    assert lora.step is not None
    assert lora.step.num_trained < 0.7 * found.policy.num_trained
    for one in found.remedies:
        assert one.step is not None, one.note


def test_few_layers_show_what_many_take(tmp_path: Path) -> None:
    file = _write(tmp_path, policy={"name": "topk", "keep": 0.25, "along": "rows"})
    recipe = _recipe(file)
    material = gather_material(recipe, [])
    rehearsal = Rehearsal(material, material.describe(recipe, make_order(recipe, material))[0], gpu=True)
    few, more, whole = (rehearsal.forecast(recipe, layers) for layers in (*DEPTHS[:2], 10))
    found = extend(few, more, *DEPTHS[:2], 10)
    assert found.num_parameters == whole.num_parameters
    assert found.pass_flops == pytest.approx(whole.pass_flops, rel=1e-9)
    for phase, parts in whole.phases.items():
        for name, size in parts.model_dump().items():
            assert getattr(found.phases[phase], name) == pytest.approx(size, rel=0.01, abs=20_000), (phase, name)


def test_eager_updates_hold_fewer_gradients_and_the_optimizer_counts_from_the_begin(tmp_path: Path) -> None:
    dense = _forecast(_write(tmp_path, training={"max_grad_norm": None})).policy
    eager = _forecast(_write(tmp_path, training={"max_grad_norm": None}, backward={"update": "eager"})).policy
    assert max(parts.gradients for parts in eager.phases.values()) < 0.5 * dense.gradient_bytes
    assert {parts.optimizer for parts in dense.phases.values()} == {eager.peak.optimizer}


def test_a_step_that_compares_itself_counts_and_without_comparisons_it_needs_less(tmp_path: Path) -> None:
    found = _forecast(_write(tmp_path, policy={"name": "lossless"}), remedies=True)
    step, need = found.policy, found.need(found.policy)
    assert step.comparison is not None
    assert step.comparison.total >= step.peak.total + step.gradient_bytes // 2, "the gradient of both passes"
    assert need == step.comparison.total
    (never,) = (one for one in found.remedies if one.changes == ["policy.0.verify=never"])
    assert never.step is not None
    assert found.need(never.step) == step.peak.total
    alone = _forecast(_write(tmp_path, policy={"name": "lossless", "verify": "never"})).policy
    assert alone == never.step
    always = _forecast(_write(tmp_path, policy={"name": "lossless", "verify": "always"})).policy
    assert (always.comparison, always.peak) == (None, step.comparison)
    assert always.pass_flops > 2.5 * alone.pass_flops, "the plain pass and the packed one, and the step"


@pytest.mark.parametrize(
    "policy",
    [{"name": "dropbp", "keep": 0.25, "sensitivity_at": 0.5}, {"name": "gact", "bits": 4, "adapt_interval": 3}],
    ids=lambda policy: policy["name"],
)
def test_trial_passes_before_any_step_count(tmp_path: Path, policy: dict[str, Any]) -> None:
    """Those of dropbp come in the middle of the training and drop nothing: a dense pass beside optimizer state."""
    step = _forecast(_write(tmp_path, policy=policy)).policy
    assert step.trial is not None
    assert step.trial.optimizer == step.peak.optimizer
    assert step.largest_bytes == max(step.peak.total, step.trial.total)
    if policy["name"] == "dropbp":
        dense = _forecast(_write(tmp_path, policy={"name": "dense"})).policy
        passes = max(dense.phases[phase].total for phase in ("forward", "backward"))
        assert step.trial.total == pytest.approx(passes, rel=0.1)


def test_without_any_trial_pass_none_is_forecast(tmp_path: Path) -> None:
    step = _forecast(_write(tmp_path, policy={"name": "dropbp", "keep": 0.25})).policy
    assert (step.trial, step.largest_bytes) == (None, step.peak.total)


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "tokens", "keep": 0.25, "score": "gradient_norm"},
        {"name": "tokens", "keep": 0.25, "score": "entropy"},
    ],
    ids=lambda policy: policy["score"],
)
def test_tokens_that_are_chosen_by_unknown_scores_are_as_many(tmp_path: Path, policy: dict[str, Any]) -> None:
    """A quarter of the tokens, and so of the logits."""
    found = _forecast(_write(tmp_path, policy=policy))
    backward = found.policy.phases["backward"], found.dense.phases["backward"]  # the forward scores all of them
    assert 0 < backward[0].logits < 0.5 * backward[1].logits


def test_what_a_run_refuses_for_its_names_is_refused_in_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"^where: '\*\.w_proj' matches no site"):
        _forecast(_write(tmp_path, policy={"name": "topk", "keep": 0.5, "where": ["*.w_proj"]}))


def test_a_base_of_4_bits_is_counted_in_4_bits_and_one_of_8_is_refused(tmp_path: Path) -> None:
    model: dict[str, Any] = {"quantization": {"type": "nf4"}, "lora": {"r": 4}}
    step = _forecast(_write(tmp_path, model=model)).policy
    linears, rest = (
        2 * (4 * 32 * 32 + 3 * 32 * 48),
        2 * 512 * 32 + 5 * 32,
    )  # the head and the embedding stay as they are
    scales = linears / 64  # one for each block of 64, in float32
    assert step.peak.weights == pytest.approx(linears / 2 + 4 * scales + 4 * (rest + step.num_trained), rel=0.01)
    assert step.num_parameters == linears + rest + step.num_trained
    with pytest.raises(UnsupportedError, match="cannot forecast the memory of an int8 model"):
        _forecast(_write(tmp_path, model=model | {"quantization": {"type": "int8"}}))


def test_dense_beside_an_optimizer_that_needs_the_policy_has_another(tmp_path: Path) -> None:
    policy = {"name": "frozen", "freeze": ["*lora_A*"]}
    found = _forecast(_write(tmp_path, policy=policy, model={"lora": {"r": 4}}, training={"optim": "lora-fa"}))
    assert found.policy.gradient_bytes < found.dense.gradient_bytes == 4 * found.dense.num_trained
    assert any("the dense run uses adamw, because lora-fa works only" in text for text in found.assumptions)


def test_a_change_to_lossless_saves_nothing_where_its_comparison_is_the_peak(tmp_path: Path) -> None:
    found = _forecast(_write(tmp_path), remedies=True)
    for one in found.remedies:
        if one.step is not None:
            assert one.step.largest_bytes < found.policy.largest_bytes, one.changes


@pytest.mark.parametrize("family", ["bert", "roberta", "opt"])
def test_a_tokenizer_without_a_vocabulary_is_none(tmp_path: Path, family: str) -> None:
    """transformers makes one, whose texts have special tokens alone: batches would be two tokens long."""
    file = _write(tmp_path, dataset={"name": str(tmp_path / "rows.jsonl"), "format": "classification"})
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": family, "vocab_size": 512, "num_hidden_layers": 1, "hidden_size": 32})
    )
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"text": "one of them", "label": 0}\n{"text": "another", "label": 1}\n' * 9)
    recipe = _recipe(file)
    with pytest.raises(DataError, match=r"has only \d special tokens: add tokenizer.json"):
        build_tokenizer(recipe.model)
    assert not gather_material(recipe, []).is_read


def test_a_model_that_is_not_here_and_a_reference_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.name: somebody/model is not on this machine; .* config.json is enough"):
        _forecast(_write(tmp_path, model={"name": "somebody/model"}))
    reference = {"name": "tokens", "keep": 0.5, "score": "excess", "reference": str(tmp_path / "model")}
    with pytest.raises(UnsupportedError, match=r"cannot forecast a policy that uses a reference model"):
        _forecast(_write(tmp_path, policy=reference))
