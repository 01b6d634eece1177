"""Tables of names of other tools: they have theirs, a recipe has ours, and errors say the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from sparsebp_cli.recipe import Recipe
from sparsebp_cli.recipe.foreign_key import ANSWERS, NOT_NEEDED
from sparsebp_tools.foreign_recipe import convert
from tests.docs.block import ROOT

PAGE = (ROOT / "docs" / "guide" / "coming-from.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| [^|]*\|$", re.MULTILINE)


def table(head: str) -> dict[str, str]:
    """The rows of the table whose first column has this head: their name, and what a recipe writes."""
    return dict(ROW.findall(PAGE.partition(f"| {head} | in a recipe | |\n")[2].partition("\n\n")[0]))


TABLES = {head: table(head) for head in ("`TrainingArguments`", "`SFTConfig`", "axolotl")}
ROWS = [(name, ours) for rows in TABLES.values() for name, ours in rows.items()]


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_names_of_the_trainer_are_fields_of_the_installed_one() -> None:
    from transformers import EarlyStoppingCallback, TrainingArguments

    # The patience is an argument of its callback.
    assert set(TABLES["`TrainingArguments`"]) - {"early_stopping_patience"} <= fields(TrainingArguments)
    assert "early_stopping_patience" in inspect.signature(EarlyStoppingCallback).parameters
    assert len(TABLES["`TrainingArguments`"]) >= 40


@pytest.mark.filterwarnings("ignore::FutureWarning")  # trl on a transformers that renamed arguments
def test_names_of_trl_are_fields_that_it_adds() -> None:
    from transformers import TrainingArguments
    from trl import SFTConfig

    assert set(TABLES["`SFTConfig`"]) <= fields(SFTConfig) - fields(TrainingArguments)


def find_field(path: str) -> object:
    """Return the field of a dotted key of a recipe; raise KeyError where there is none."""
    model: type[BaseModel] = Recipe
    *sections, last = path.split(".")
    for section in sections:
        if (model.__name__, section) == ("Recipe", "target"):  # its options are those of a kind
            return True
        annotation = model.model_fields[section].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model.model_fields[last]


@pytest.mark.parametrize(("name", "ours"), ROWS, ids=[name for name, _ in ROWS])
def test_what_a_recipe_writes_is_a_key_that_it_has(name: str, ours: str) -> None:
    written = re.fullmatch(r"`([\w.]+)(?:: .*)?`", ours)
    if written is None:
        assert ours in {"none", "nothing", "`sparsebp resume RUN`"}
    else:
        assert find_field(written[1])
    if ours == "nothing":
        assert name in NOT_NEEDED
        return
    if name not in ANSWERS:  # a recipe has this very key
        assert written is not None
        assert written[1].split(".")[-1] == name
        return
    said = ANSWERS[name]
    if ours == "none":
        assert said is None
    else:
        assert ours.strip("`").partition(":")[0] in str(said)


def test_a_key_that_a_recipe_lacks_would_be_found() -> None:
    with pytest.raises(KeyError):
        find_field("training.neftune_noise_alpha")


# Values of rows whose key takes neither a number nor true.
VALUES: dict[str, object] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-7,
    "base_model": "org/model",
    "chat_template_path": "chat.jinja",
    "dataset_text_field": "body",
    "deepspeed": "zero.json",
    "eval_strategy": "epoch",
    "fsdp": "full_shard",
    "label_smoothing_factor": 0.1,
    "learning_rate": 1e-4,
    "lora_dropout": 0.1,
    "lora_modules_to_save": ["lm_head"],
    "lora_target_modules": ["q_proj"],
    "lr_scheduler": "cosine",
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "lr_scheduler_type": "cosine",
    "metric_for_best_model": "eval_loss",
    "neftune_noise_alpha": 5.0,
    "optim": "adamw_torch",
    "optim_args": {"eps": 1e-7},
    "optimizer": "adamw_torch",
    "output_dir": "out",
    "report_to": "mlflow",
    "resume_from_checkpoint": "out/checkpoint-1",
    "run_name": "mine",
    "save_strategy": "epoch",
    "train_sampling_strategy": "group_by_length",
    "val_set_size": 0.2,
    "weight_decay": 0.1,
}
SWITCHES = {"assistant_only_loss", "bf16", "completion_only_loss", "fp16", "gradient_checkpointing", "load_in_4bit"}
SWITCHES |= {"load_best_model_at_end", "lora_target_linear", "packing", "padding_free", "push_to_hub", "tf32"}
SWITCHES |= {"sample_packing", "torch_compile", "train_on_inputs", "use_cpu", "use_liger_kernel"}
# Rows that `init --from` does not convert: their value needs another one, or does not say which. It names the key.
NAMED = {"adam_beta1", "adam_beta2", "adam_epsilon", "deepspeed", "eval_strategy", "fp16", "fsdp", "report_to"}
NAMED |= {"load_best_model_at_end", "resume_from_checkpoint", "save_strategy", "tf32"}
# It packs nothing; the row names the key for chats.
OTHERS = {"packing": "`policy: lossless`"}


def find_value(recipe: Mapping[str, object], path: str) -> object:
    found: object = recipe
    for part in path.split("."):
        assert isinstance(found, Mapping)
        found = found[part]
    return found


@pytest.mark.parametrize(("name", "ours"), ROWS, ids=[name for name, _ in ROWS])
def test_init_converts_each_row_to_the_key_that_the_page_names(name: str, ours: str, tmp_path: Path) -> None:
    value = VALUES.get(name, True if name in SWITCHES else 16)
    given = {name: value, "adapter": "lora"} if re.match("lora_|load_in", name) else {name: value}
    (tmp_path / "theirs.json").write_text(json.dumps(given | {"num_workers": 1, "torch_dtype": "bfloat16"}))
    converted = convert(tmp_path / "theirs.json")
    recipe, reason = yaml.safe_load(converted.text), converted.left.get(name)
    if ours == "nothing":
        assert reason is None
        assert f"# Recipes need none of these: {name}" in converted.text
        return
    written = re.fullmatch(r"`([\w.]+)(?:: (.*))?`", OTHERS.get(name, ours))
    if written is None or name in NAMED:
        assert reason is not None
        assert ours.strip("`").partition(":")[0].replace("none", "no equivalent") in reason
        return
    assert reason is None
    found = find_value(recipe, written[1])
    if written[2] is None:
        assert found == {"optim": "adamw", "optimizer": "adamw"}.get(name, value)
    else:
        assert found == yaml.safe_load(written[2].replace("NAME", str(value)))
