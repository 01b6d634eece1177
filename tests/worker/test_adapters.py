"""Adapters of peft in a run: what is trained, what is saved, and that the next recipe goes on from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import PeftType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import DataError, RecipeError
from sparsebp_cli.policy.composition import ADAPTER_TYPES, find_adapter_options
from sparsebp_cli.policy.composition.adapter import NOT_OPTIONS
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.recipe.schema import LoraSection, ModelSection, Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.source.adapter import find_adapter, read_adapter
from sparsebp_cli.worker.adapter import add_adapters, merge, merge_beside
from tests.worker.conftest import LLAMA, work

# Of peft 0.21, about transformers; and of methods, about what they do to a base.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

IDS = torch.randint(3, 60, (4, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 12:], MASK[3, 7:] = 0, 0
LABELS = IDS.masked_fill(MASK == 0, -100)
# Where the defaults of a method do not fit a model as small as this one.
OPTIONS: dict[str, dict[str, Any]] = {
    "boft": {"target_modules": ["q_proj"], "boft_block_size": 4},
    "c3a": {"target_modules": ["q_proj"], "block_size": 4},
    "fourierft": {"target_modules": ["q_proj"], "n_frequency": 20},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "ln_tuning": {},
    "miss": {"target_modules": ["q_proj"], "r": 4},
    "oft": {"target_modules": ["q_proj"], "oft_block_size": 4},
    "road": {"target_modules": ["q_proj"], "group_size": 4},
    "shira": {"target_modules": ["q_proj"], "r": 4},
    "trainable_tokens": {"token_indices": [3, 5]},
    "vblora": {"target_modules": ["q_proj"], "vector_length": 4, "num_vectors": 8, "topk": 1},
}
OPTIONS |= {name: {"target_modules": ["q_proj", "v_proj"]} for name in ADAPTER_TYPES if name not in OPTIONS}
LORAS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 4},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "saved whole": {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]},
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            **{k: v for k, v in LLAMA.items() if k != "model_type"}, vocab_size=64, use_cache=False, pad_token_id=0
        )
    )


def build(**section: Any) -> Any:
    return add_adapters(llama(), ModelSection(name="x", **section), "causal").double().train()


def gradients(model: Any, backward: Callable[[Any], object]) -> torch.Tensor:
    model.zero_grad()
    backward(model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_options_of_every_method_are_those_of_pefts_own_config() -> None:
    for kind in (*ADAPTER_TYPES, "lora"):
        fields = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind.upper())])}
        assert set(find_adapter_options(kind)) == fields - NOT_OPTIONS, kind
    assert set(LoraSection.model_fields) <= set(find_adapter_options("lora"))


@pytest.mark.parametrize("name", [*ADAPTER_TYPES, *LORAS])
def test_policies_train_every_kind_of_adapter_as_autograd_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.worker.adapter.find_source", lambda *_: None)
    model = build(lora=LORAS[name]) if name in LORAS else build(peft={"type": name} | OPTIONS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    expected = gradients(model, lambda loss: loss.backward())
    assert expected.norm() > 0
    for policy in (sbp.make_policy("topk", keep=1.0, along="rows"), "lossless"):
        with sbp.attach(model, policy) as engine:
            found = gradients(model, engine.backward)
        # peft computes c3a in float32, whatever the type of its weights.
        rounding = 1e-6 if name == "c3a" else 1e-9
        torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-12 + rounding * float(expected.abs().max()))


def saved_like(run: RunFolder, recipe: Recipe) -> None:
    """Compare the saved model with peft's own merge of the saved adapter into the base."""
    base = AutoModelForCausalLM.from_pretrained(recipe.model.name)
    expected = peft.PeftModel.from_pretrained(base, run.path / "model" / "adapter").merge_and_unload().eval()
    found = AutoModelForCausalLM.from_pretrained(run.path / "model")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, expected(IDS).logits)


@pytest.fixture
def base(tiny_recipe: Any, prepared: Any, tiny_folder: Path, tmp_path: Path) -> str:
    model = llama()
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")))
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_folder / "tokenizer").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def train(recipe: Recipe, prepared: Any) -> RunFolder:
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return run


def last_loss(run: RunFolder) -> float:
    return list(History.load(run.path).series("eval/loss").values())[-1]


def test_the_output_of_a_run_with_adapters_is_a_model_for_the_next_recipe(
    base: str, tiny_recipe: Any, prepared: Any
) -> None:
    def recipe(**model: Any) -> Recipe:
        made = tiny_recipe(measure={"eval_every": 10}, checkpoint={"keep_best": "eval/loss"})
        return made.model_copy(update={"model": ModelSection(**model)})

    first = recipe(name=base, lora={"r": 4, "use_rslora": True})
    run = train(first, prepared)
    saved_like(run, first)
    config = json.loads((run.path / "model" / "config.json").read_text())
    assert config.get("use_cache", True) is True
    assert (
        json.loads((run.path / "model" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == base
    )
    last, best = (load_file(run.path / folder / "model.safetensors") for folder in ("model", "best"))
    assert last.keys() == best.keys() == load_file(Path(base) / "model.safetensors").keys()
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    again = AutoModelForCausalLM.from_pretrained(run.path / "model")
    again.generate(**tokenizer("Line 3", return_tensors="pt"), max_new_tokens=2)

    start = last_loss(run)
    for model in (
        {"name": str(run.path / "model")},  # the merged model, all of it
        {"name": base, "adapter": str(run.path / "model")},  # the adapter on its base
    ):
        second = train(recipe(**model), prepared)
        (at_start, *_) = History.load(second.path).series("eval/loss").values()
        assert at_start == pytest.approx(start, rel=1e-5)
        assert last_loss(second) != start
    trained = History.load(second.path).facts["num_trainable_parameters"]
    assert trained == History.load(run.path).facts["num_trainable_parameters"]
    saved_like(second, recipe(name=base))


def test_the_settings_of_an_adapter_have_one_order(tmp_path: Path) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a set, of a random order
    config = peft.LoraConfig(r=2, target_modules=names, layers_to_transform=[1, 0])
    merge_beside(peft.get_peft_model(llama(), config), tmp_path, keeps=False)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(names)
    assert written["layers_to_transform"] == [1, 0]
    assert peft.LoraConfig.from_pretrained(tmp_path).target_modules == set(names)


def test_an_adapter_says_for_which_task_it_is() -> None:
    assert build(lora={"r": 2}).peft_config["default"].task_type == "CAUSAL_LM"


@pytest.mark.parametrize("start", [True, "pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_not_for_a_quantised_one(tmp_path: Path, start: bool | str) -> None:
    config = peft.LoraConfig(r=2, init_lora_weights=start, target_modules=["q_proj"])
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path)
    again = ModelSection.model_validate({"name": "x", "adapter": str(tmp_path), "quantization": {"type": "int8"}})
    if start is True:
        assert add_adapters(llama(), again, "causal").peft_config["default"].r == 2
    else:
        with pytest.raises(DataError, match=r"needs a base model without model\.quantization"):
            add_adapters(llama(), again, "causal")


def test_only_a_module_that_shares_its_weight_gets_a_copy_of_it() -> None:
    adapted = build(lora={"r": 2, "target_modules": ["q_proj"]})
    weight = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    merged: Any = merge(adapted)
    assert merged.model.layers[0].self_attn.q_proj.weight is weight
    assert merged.config.tie_word_embeddings == llama().config.tie_word_embeddings


EMBEDDING: dict[str, Any] = {"embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}}


@pytest.mark.slow
@pytest.mark.always("trainable_tokens", "embedding", "vera", "dora", "ia3")
@pytest.mark.parametrize("name", [*ADAPTER_TYPES, *LORAS, *EMBEDDING])
def test_a_run_trains_and_saves_every_kind_of_adapter(base: str, tiny_recipe: Any, prepared: Any, name: str) -> None:
    loras = LORAS | EMBEDDING
    adapters = {"lora": loras[name]} if name in loras else {"peft": {"type": name} | OPTIONS[name]}
    values = tiny_recipe(training={"max_steps": 2}, checkpoint={"every": 2}).model_dump()
    run = train(Recipe.model_validate(values | {"model": {"name": base, **adapters}}), prepared)
    record = json.loads((run.path / "model" / "manifest.json").read_text())["outputs"]
    assert record["checked"]
    assert record["difference"] <= 1e-4


def test_an_adapter_that_is_merged_already_is_not_added_again(base: str, tiny_recipe: Any, prepared: Any) -> None:
    run = train(tiny_recipe(model={"config": LLAMA, "lora": {"r": 2}}, training={"max_steps": 1}), prepared)
    folder = str(run.path / "model")
    with pytest.raises(DataError, match=r"this adapter is already merged into the model"):
        find_adapter(folder, folder)
    assert find_adapter(folder, base) == run.path / "model" / "adapter"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lora: {r: 2, use_rsLora: true}", "unknown key 'use_rsLora'.*did you mean use_rslora"),
        ("lora: {init_lora_weights: pissa}", "unknown key 'init_lora_weights': recipes have no equivalent key"),
        ("peft: {type: ia4}", "model.peft.type: .*did you mean"),
        ("peft: {type: lora, r: 2}", r"model.peft.type: LoRA has its own key: write 'model.lora: \{r: 8"),
        ("peft: {type: ia3, target_module: [q_proj]}", "not an option of ia3; allowed: .*did you mean target_modules"),
        ("peft: {type: adalora}", "model.peft.type: "),
        ("lora: {r: 2}, peft: {type: ia3}", "give only one of lora, peft and adapter, got lora and peft"),
    ],
)
def test_a_wrong_key_of_adapters_is_one_line(tmp_path: Path, model: str, says: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"version: 1\nname: x\nmodel: {{name: austen-llama, {model}}}\ndataset: {{name: austen}}\n")
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora": {"target_modules": ["q_proj", "v_pro"]}}, "lora.target_modules: 'v_pro' .*; did you mean v_proj?"),
        ({"lora": {"modules_to_save": ["lm_haed"]}}, "lora.modules_to_save: 'lm_haed' .*; did you mean lm_head?"),
        ({"peft": {"type": "loha", "target_modules": ["layers.0.self_attn.q_proj", "proj"]}}, "peft.*: 'proj' matches"),
    ],
)
def test_a_name_that_matches_no_module_is_refused_beside_one_that_does(options: dict[str, Any], says: str) -> None:
    section = ModelSection.model_validate({"name": "austen-llama", **options})
    with pytest.raises(DataError, match=f"model.{says}") as caught:
        add_adapters(llama(), section, "causal")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "XLORA"}, "peft_type must be one of"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config is not allowed"),
        (None, "no adapter_model.safetensors"),
        ({}, "auto_map"),
    ],
)
def test_an_adapter_that_leads_elsewhere_is_refused(tmp_path: Path, changes: dict[str, Any] | None, says: str) -> None:
    peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    if says == "auto_map":
        (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.Tokenizer"}}')
    if changes is None:
        (tmp_path / "adapter_model.safetensors").unlink()
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (changes or {})))
    with pytest.raises(DataError, match=says):
        read_adapter(find_adapter(str(tmp_path)))
