"""``sparsebp init --from``: configurations as axolotl, LLaMA-Factory, torchtune and TRL publish them become recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sparsebp_cli.cli import init as verb
from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.recipe.foreign_key import ANSWERS, NOT_NEEDED
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_tools.foreign_recipe import RULES, convert

from .conftest import Cli

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
adapter: lora
sequence_len: 2048
sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj]
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 3
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
evals_per_epoch: 4
weight_decay: 0.0
special_tokens: {pad_token: <|end_of_text|>}
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_output_dir: true
save_steps: 500
report_to: none
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
warmup_ratio: 0.1
val_size: 0
"""
TORCHTUNE = """
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 64, lora_alpha: 128}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Llama}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, fused: true, weight_decay: 0.01, lr: 3e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
epochs: 1
clip_grad_norm: null
dtype: bf16
enable_activation_checkpointing: false
"""
TRL = json.dumps(
    {
        "model_name_or_path": "Qwen/Qwen3-0.6B",
        "dataset_name": "trl-lib/Capybara",
        "max_steps": -1,
        "num_train_epochs": 2,
        "max_length": 4096,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "use_peft": True,
        "assistant_only_loss": True,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
    }
)


def read(tmp_path: Path, text: str) -> tuple[dict[str, Any], set[str], str]:
    """The recipe, the keys that were not carried over, and the file's text."""
    (tmp_path / "theirs.yaml").write_text(text)
    found = convert(tmp_path / "theirs.yaml")
    assert not any(reason.endswith(": ") for reason in found.left.values()), found.left
    return yaml.safe_load(found.text), set(found.left), found.text


def test_axolotl(tmp_path: Path) -> None:
    recipe, left, text = read(tmp_path, AXOLOTL)
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["gate_proj", "down_proj"]}
    assert recipe.pop("version") == 1
    assert recipe == {
        "model": {"name": "NousResearch/Llama-3.2-1B", "quantization": {"type": "int8"}, "lora": lora},
        "dataset": {
            "name": "teknium/GPT4-LLM-Cleaned",
            "eval_fraction": 0.1,
            "max_seq_length": 2048,
        },
        "policy": "lossless",
        "training": {
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 3,
            "num_train_epochs": 1,
            "lr_scheduler_type": "cosine",
            "learning_rate": 2e-4,
            "mixed_precision": "bf16",
            "weight_decay": 0.0,
            "weight_decay_of": "matrices",
        },
        "backward": {"checkpointing": "full"},
    }
    assert left == {
        "strict",
        "pad_to_sequence_len",
        "optimizer",
        "evals_per_epoch",
        "special_tokens.pad_token",
        "datasets.type",
    }
    assert "# Missing: dataset.format" in text
    assert "datasets.type: 'alpaca': recipes have another kind of value here; in a recipe, write dataset.format" in text
    assert "Recipes need none of these: dataset_prepared_path" in text


def test_llama_factory(tmp_path: Path) -> None:
    recipe, left, text = read(tmp_path, LLAMA_FACTORY)
    assert recipe["model"]["lora"] == {"r": 8, "target_modules": ["q_proj", "v_proj"]}
    assert recipe["dataset"] == {"max_seq_length": 2048, "max_examples": 1000, "eval_split": "train"}
    assert recipe["training"]["warmup_steps"] == 0.1
    assert recipe["checkpoint"] == {"every": 500}
    assert left == {"trust_remote_code", "dataset", "template", "report_to"}
    assert "# Missing: dataset.name" in text
    assert "sets no lr_scheduler_type, weight_decay, lora_alpha: SparseBP's defaults hold" in text


def test_torchtune(tmp_path: Path) -> None:
    recipe, left, _ = read(tmp_path, TORCHTUNE)
    assert recipe["model"] == {"lora": {"r": 64, "lora_alpha": 128}, "name": "/tmp/Llama", "dtype": "bfloat16"}
    assert recipe["training"] == {
        "per_device_train_batch_size": 4,
        "optim": "adamw",
        "weight_decay": 0.01,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 100,
        "num_train_epochs": 1,
        "max_grad_norm": None,  # never clipped there; ours clips to 1 unless it is told
    }
    assert recipe["policy"] == "lossless"
    assert left == {"optimizer.fused"}


@pytest.mark.parametrize(
    ("model", "expected", "left"),
    [
        ("_component_: torchtune.models.llama3.qlora_llama3_8b", {"lora": {}, "quantization": {"type": "nf4"}}, ""),
        ("_component_: torchtune.models.qwen2_5.lora_qwen2_5_0_5b", {"lora": {}}, ""),
        ("_component_: torchtune.models.llama3.llama3_8b", None, ""),
        (
            "_component_: torchtune.models.llama2.lora_llama2_7b, quantize_base: true, use_dora: true",
            {"lora": {"use_dora": True}, "quantization": {"type": "nf4"}},
            "",
        ),
        ("_component_: torchtune.models.llama3.dora_llama3_8b", None, "model._component_"),
        ("_component_: torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b", None, "model._component_"),
        ("_component_: torchtune.models.mistral.lora_mistral_reward_7b", None, "model._component_"),
        ("_component_: mine.models.wide", None, "model._component_"),
    ],
)
def test_builders_of_torchtune(tmp_path: Path, model: str, expected: dict[str, Any] | None, left: str) -> None:
    recipe, found, _ = read(tmp_path, f"model: {{{model}}}\nepochs: 1\n")
    assert recipe.get("model") == expected
    assert found == {left} - {""}


def test_components_of_torchtune_that_change_the_training_are_named(tmp_path: Path) -> None:
    _, left, text = read(
        tmp_path,
        "quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer}\n"
        "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n"
        "profiler: {_component_: torchtune.training.setup_torch_profiler}\n"
        "optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit}\nepochs: 1\n",
    )
    assert left == {"quantizer._component_", "loss._component_", "optimizer._component_"}
    assert "recipes do not name Python classes, and what this one changes is not converted" in text
    _, left, _ = read(tmp_path, "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\nepochs: 1\n")
    assert not left


def test_trl(tmp_path: Path) -> None:
    recipe, left, _ = read(tmp_path, TRL)
    assert recipe["model"] == {"name": "Qwen/Qwen3-0.6B", "lora": {}}
    assert recipe["dataset"]["train_on"] == "assistant"
    assert recipe["training"] == {"num_train_epochs": 2, "max_grad_norm": None, "optim": "adamw"}
    assert recipe["measure"] == {"eval_every": 100}
    assert left == {"adam_beta2"}


@pytest.mark.parametrize(
    ("switch", "left", "why"),
    [
        ("use_peft: false", {"lora_r", "lora_alpha", "load_in_4bit"}, "use_peft is false"),
        ("", {"lora_r", "lora_alpha", "load_in_4bit"}, "neither 'use_peft: true' nor 'adapter: lora'"),
        ("adapter:", {"lora_r", "lora_alpha", "load_in_4bit"}, "adapter is nothing"),
        ('adapter: ""', {"lora_r", "lora_alpha", "load_in_4bit"}, "adapter is ''"),
        ("finetuning_type: full", {"lora_r", "lora_alpha", "load_in_4bit"}, "finetuning_type is 'full'"),
        (
            "finetuning_type: freeze",
            {"finetuning_type", "lora_r", "lora_alpha", "load_in_4bit"},
            "finetuning_type is 'freeze'",
        ),
    ],
)
def test_keys_of_adapters_are_left_out_if_the_other_tool_trains_all_weights(
    tmp_path: Path, switch: str, left: set[str], why: str
) -> None:
    given = "model_name_or_path: m\nlora_r: 16\nlora_alpha: 32\nload_in_4bit: true\nload_in_8bit: false\n"
    recipe, found, text = read(tmp_path, f"{switch}\n{given}")
    assert recipe["model"] == {"name": "m"}
    assert found == left
    assert f"#   lora_r: 16: the other tool ignores it, because {'the file has ' * (not switch)}{why}" in text
    assert "#   load_in_4bit: true: quantised weights are trained only with adapters, but " in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter: qlora\nload_in_4bit: true\nlora_r: 4", {"quantization": {"type": "nf4"}, "lora": {"r": 4}}),
        ("use_peft: true\nlora_r: 4\nload_in_4bit: true", {"quantization": {"type": "nf4"}, "lora": {"r": 4}}),
        ("stage: sft\nlora_rank: 4", {"lora": {"r": 4}}),  # LLaMA-Factory's default
        ("lora_rank: 4\nlora_alpha: 8", {"lora": {"r": 4, "lora_alpha": 8}}),
        ("stage: sft\nlearning_rate: 1e-4", {"lora": {}}),
    ],
)
def test_keys_of_adapters_are_converted_if_the_other_tool_uses_them(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    recipe, left, _ = read(tmp_path, text)
    assert recipe["model"] == expected
    assert not left


def find_wrong(recipe: dict[str, Any]) -> list[tuple[int | str, ...]]:
    """Where the schema finds something wrong."""
    try:
        Recipe.model_validate(recipe)
    except ValidationError as error:
        return [one["loc"] for one in error.errors()]
    return []


VALUES = (True, False, 0, 1, 4, -1, 0.5, "2e-4", "x", [1], ["a"], {"a": 1})


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_key_with_any_value_makes_a_recipe_that_the_schema_refuses(tmp_path: Path, value: object) -> None:
    keys = sorted({key for key in (*ANSWERS, *NOT_NEEDED, *RULES) if re.fullmatch(r"\w+", key)})
    assert len(keys) > 100
    for key in keys:
        recipe, _, text = read(tmp_path, json.dumps({key: value, "num_workers": 3, "weight_decay": 0.1}))
        recipe.pop("policy", None)
        for part in ("model", "dataset"):
            recipe[part] = {"name": "x"} | recipe.get(part, {})
        wrong = find_wrong({"name": "x"} | recipe)
        # Keys of one section that need each other may remain; the file names the section.
        assert all(len(location) == 1 and f"#   {location[0]}: " in text for location in wrong), (key, wrong)


@pytest.mark.parametrize("key", ["val_set_size", "val_size", "test_size"])
@pytest.mark.parametrize("zero", ["0", "0.0"])
def test_no_row_is_held_out_if_the_other_tool_holds_out_none(tmp_path: Path, key: str, zero: str) -> None:
    recipe, left, text = read(tmp_path, f"{key}: {zero}\nlearning_rate: 1e-4\n")
    assert recipe["dataset"] == {"eval_split": "train"}
    assert recipe["measure"] == {"eval_examples": 100}
    assert not left
    assert "# All rows of the split train are trained: evaluations read some of them again." in text
    recipe, left, text = read(tmp_path, f"{key}: {zero}\ndataset_test_split: held\n")
    assert recipe == {"version": 1, "dataset": {"eval_split": "held"}}
    recipe, left, text = read(tmp_path, f"{key}: {zero}\ndatasets: [{{path: x, split: big}}]\neval_examples: 5\n")
    assert recipe["dataset"] == {"name": "x", "split": "big", "eval_split": "big"}


def test_a_file_without_validation_says_what_is_held_out(tmp_path: Path) -> None:
    line = "# The file says nothing on validation: SparseBP holds out 10 % of the rows (eval_fraction)."
    assert line in read(tmp_path, "learning_rate: 1e-4\n")[2]
    assert line not in read(tmp_path, "learning_rate: 1e-4\nval_size: 0.2\n")[2]
    assert Recipe.model_fields["dataset"].annotation.model_fields["eval_fraction"].default == 0.1  # type: ignore[union-attr]


def test_every_key_is_carried_or_named(tmp_path: Path) -> None:
    _, left, text = read(tmp_path, "learning_rate: 1e-4\nnever_heard: 3\nfsdp_config: {a: 1, b: [2]}\nlogging_dir: x\n")
    assert left == {"never_heard", "fsdp_config.a", "fsdp_config.b"}
    assert "none of these: logging_dir" in text


def test_a_line_break_adds_nothing_to_the_recipe(tmp_path: Path) -> None:
    recipe, left, _ = read(tmp_path, json.dumps({"seed": 3, "max_steps": "x", "y": "a\nb: 1"}))
    assert recipe == {"version": 1, "training": {"seed": 3}}
    assert left == {"max_steps", "y"}
    with pytest.raises(RecipeError, match="a key must be printable"):
        read(tmp_path, json.dumps({"seed": 3, "x\npolicy: topk": 1}))


def test_a_second_key_for_the_same_setting_is_named(tmp_path: Path) -> None:
    recipe, left, text = read(tmp_path, "max_length: 512\nmax_seq_length: 256\n")
    assert recipe["dataset"]["max_seq_length"] == 512
    assert left == {"max_seq_length"}
    assert "another key has set dataset.max_seq_length to 512" in text


@pytest.mark.parametrize("share", ["0.1", "0"])
def test_the_recipe_of_local_data_validates(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"text": 30 * "Good day to you. "}) + "\n"
    Path("talks.jsonl").write_text(40 * row)
    theirs = "base_model: austen-llama\ndatasets: [{path: talks.jsonl, type: completion}]\nmax_steps: 3\n"
    Path("axolotl.yaml").write_text(
        theirs + f"micro_batch_size: 4\nval_set_size: {share}\nlearning_rate: 1e-3\nstrict: true\n"
    )
    done = cli("init", "study", "--from", "axolotl.yaml")
    assert done.returncode == 0, done.stderr
    assert "next: sparsebp validate study/axolotl.yaml" in done.stdout
    assert "not converted: strict; the end of the file gives the reasons" in done.stdout
    recipe = yaml.safe_load(Path("study/axolotl.yaml").read_text())
    assert recipe["dataset"]["name"] == str(tmp_path / "talks.jsonl")
    done = cli("validate", "study/axolotl.yaml")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "must be a mapping of keys"),
        ("", "must be a mapping of keys"),
        ("a: [\n", "theirs.yaml:2"),
        ("never_heard: 3\n", "no key of this file can be converted"),
    ],
)
def test_other_files_are_refused_and_nothing_is_written(cli: Cli, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    done = cli("init", str(tmp_path / "study"), "--from", str(tmp_path / "theirs.yaml"))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "study").exists()


def test_other_options_and_a_missing_package_are_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL)
    words = ("init", str(tmp_path / "study"), "--from", str(tmp_path / "theirs.yaml"))
    assert "leave out --task, --model, --data and --columns" in cli(*words, "--model", "x").stderr
    monkeypatch.setattr(verb, "find_tool", lambda name: None)
    with pytest.raises(UsageError, match="in the package sparsebp-tools"):
        verb.init(tmp_path / "study", file=tmp_path / "theirs.yaml")
    assert not (tmp_path / "study").exists()
