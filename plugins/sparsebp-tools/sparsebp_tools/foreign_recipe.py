"""Turn a configuration of axolotl, TRL, LLaMA-Factory or torchtune into a recipe, and say what was not carried over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.error_text import shorten, show
from sparsebp_cli.policy.field_error import FieldError, describe_errors
from sparsebp_cli.recipe.document import read_document
from sparsebp_cli.recipe.foreign_key import ANSWERS, NOT_NEEDED, answer
from sparsebp_cli.recipe.loader import read_text
from sparsebp_cli.recipe.schema import Recipe, TrainingSection

Settings = dict[str, Any]  # recipe key, dotted, to value

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw", "sgd": "sgd"}
OPTIMIZERS |= {"torch.optim.AdamW": "adamw", "torch.optim.SGD": "sgd", "torch.optim.Adam": "adam"}
FORMATS = {"chat_template": "chat", "chat": "chat", "completion": "text"}
# Keys whose absence matters most: the other tool's default is rarely ours.
TELLING = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "lr_scheduler_type", "weight_decay")
# Keys of the table in ``foreign_key`` whose values mean something else than those of the recipe's key.
OTHER_VALUES = {"do_eval", "eval_strategy", "evals_per_epoch", "evaluation_strategy", "report_to", "save_strategy"}
OTHER_VALUES |= {"precision", "saves_per_epoch", "stage", "template"}
OF_ADAPTERS = re.compile(r"lora|dora|^peft_")
EVALUATED = 100  # examples that an evaluation reads if no row is held out: it would otherwise read all
QUANTIZERS = ("load_in_4bit", "load_in_8bit", "quantization_bit")
OF_LLAMA_FACTORY = {"stage", "cutoff_len", "lora_rank", "lora_target"}  # it trains LoRA unless the file says otherwise


@dataclass(frozen=True)
class Converted:
    """A recipe made from another tool's configuration.

    Args:
        text: The recipe as YAML, with comments that name every key that was not carried over.
        left: Such keys, each with its value and the reason.
    """

    text: str
    left: Mapping[str, str]


def convert(file: Path, locate: Callable[[str], str] = str) -> Converted:
    """Return a recipe for another tool's configuration.

    Args:
        file: The configuration, in YAML or JSON.
        locate: Returns the name to write for a model or data, such as an absolute path for a relative one.

    Returns:
        The recipe. Its schema accepts every value; keys may be missing, and its first lines name them.

    Raises:
        UsageError: The file is not a mapping in YAML or JSON, or no key of it has a place in a recipe.
        RecipeError: The file cannot be read, or is not valid YAML.
    """
    tree = read_document(read_text(file), str(file))
    found = None if tree is None else tree.plain
    if not isinstance(found, dict):
        raise UsageError(
            f"--from {file}: must be a mapping of keys, such as a config file of axolotl, TRL, LLaMA-Factory or "
            "torchtune"
        )
    settings: Settings = {**LORA} if "stage" in found and "finetuning_type" not in found else {}  # LLaMA-Factory
    left: dict[str, str] = {}
    needless: list[str] = []
    ignored = _find_ignored(found)
    for key, value in _find_leaves(found):
        if key in ignored and value not in (None, "", False):
            left[key] = f"{shorten(show(value), 40)}: {ignored[key]}"
        elif key not in RULES and key.rpartition(".")[2] in NOT_NEEDED:
            needless.append(key)
        elif reason := _carry(key, value, settings):
            left[key] = f"{shorten(show(value), 40)}: {reason}"
    _train_all(settings)
    for key in ("model.name", "dataset.name"):
        if isinstance(settings.get(key), str):
            settings[key] = locate(settings[key])
    recipe = _drop_wrong(_nest(settings), left)
    if not recipe:
        raise UsageError(f"--from {file}: no key of this file can be converted to a key of a recipe")
    return Converted(_write(recipe, left, needless, file), left)


def _find_ignored(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys on adapters that the other tool does not use because it trains all weights, with the reason."""
    on = {"adapter": bool, "use_peft": bool, "finetuning_type": lambda value: value in (None, "lora")}
    given = [key for key in on if key in found]
    if any(on[key](found[key]) for key in given) or not (given or OF_LLAMA_FACTORY.isdisjoint(found)):
        return {}
    why = " and ".join(f"{key} is {show(found[key])}" for key in given)
    why = why or "the file has neither 'use_peft: true' nor 'adapter: lora'"
    reasons = {key: f"the other tool ignores it, because {why}" for key in found if OF_ADAPTERS.search(key)}
    return reasons | dict.fromkeys(QUANTIZERS, f"quantised weights are trained only with adapters, but {why}")


def _find_leaves(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. Only torchtune nests; the first entry of axolotl's ``datasets`` is a part too."""
    for key, value in found.items():  # the reader refuses a key with a line break, which would end its comment
        path = f"{above}{key}"
        if key == "datasets" and isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _find_leaves(value[0], "datasets.")
            for number, one in enumerate(value[1:], start=1):
                yield f"datasets[{number}]", one
        elif isinstance(value, dict) and key not in ("optim_args", "lr_scheduler_kwargs") and value:
            yield from _find_leaves(value, f"{path}.")
        else:
            yield path, value


def _carry(key: str, value: Any, settings: Settings) -> str:
    """Add a key's meaning to the settings. Return why not, or an empty text."""
    leaf = key.rpartition(".")[2]
    rule = RULES.get(key) or RULES.get(leaf)
    more: Settings | None
    if rule is _norm:
        more = _norm(value)
    elif value is None or value == "":
        return ""
    elif rule is not None:
        more = rule(value)
    elif leaf in TrainingSection.model_fields:
        more = {f"training.{leaf}": value}
    elif leaf not in OTHER_VALUES:
        more = _follow_answer(ANSWERS.get(leaf), value)
    else:
        more = None
    if more is None:
        if leaf == "_component_":
            return "recipes do not name Python classes, and what this one changes is not converted"
        name = "stage" if key == "datasets.type" else "datasets" if leaf.startswith("dataset") else leaf
        text = answer(name) or "recipes have no such key"
        return text if rule is None else f"recipes have another kind of value here; {text}"
    for name, one in more.items():
        if settings.setdefault(name, one) != one:
            return f"another key has set {name} to {show(settings[name])}"
    return ""


def _follow_answer(target: str | None, value: Any) -> Settings | None:
    """Return the setting that the table of keys names. None if the table has none, or has a choice."""
    match = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*)(?:: ([a-z0-9_/]+))?", target or "")
    if match is None:
        return None
    key, fixed = match.groups()
    if fixed is None:
        return {key: value}
    return {key: fixed} if value is True else {} if value is False else None


def _either(table: Mapping[Any, Settings]) -> Callable[[Any], Settings | None]:
    return lambda value: table.get(value if isinstance(value, str | bool | int) else None)


def _number(key: str) -> Callable[[Any], Settings | None]:
    """Return a rule that reads a number, also from a text such as 2e-4, which YAML 1.1 does not read as one."""

    def read(value: Any) -> Settings | None:
        try:
            return {key: float(value)}
        except (TypeError, ValueError):
            return None

    return read


def _norm(value: Any) -> Settings:
    return {"training.max_grad_norm": value or None}  # 0 and null: never clipped


def _share(value: Any) -> Settings | None:
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
    return {"dataset.eval_fraction": value} if is_share else None


def _train_all(settings: Settings) -> None:
    """Replace a fraction of 0, which recipes do not have, by an evaluation of the training split."""
    if settings.get("dataset.eval_fraction") == 0:
        del settings["dataset.eval_fraction"]
        if settings.setdefault("dataset.eval_split", split := settings.get("dataset.split", "train")) == split:
            settings.setdefault("measure.eval_examples", EVALUATED)


def _count(value: Any) -> Settings | None:
    if not isinstance(value, int):
        return None
    return {"training.max_steps": value} if value > 0 else {}  # -1: by epochs


def _decay(value: Any) -> Settings | None:
    return {"training.weight_decay": value, "training.weight_decay_of": "matrices"}  # as transformers' Trainer does


def _modules(value: Any) -> Settings | None:
    if value in ("all", "all-linear"):
        return {"model.lora.target_modules": "all-linear"}
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        return None
    return {"model.lora.target_modules": [str(name).strip() for name in names]}


def _builder(value: Any) -> Settings | None:
    """Read torchtune's function for a model: of plain weights, or with adapters on plain or quantised weights."""
    family, _, name = str(value).removeprefix("torchtune.models.").partition(".")
    plain = re.sub(r"^q?lora_", "", name)
    if not plain.startswith(family) or re.search(r"vision|classifier|reward", name):
        return None
    if plain == name:
        return {}
    return LORA | ({"model.quantization.type": "nf4"} if name.startswith("q") else {})


def _loss(value: Any) -> Settings | None:
    return {} if re.search(r"CE|CrossEntropy", str(value)) else None  # of preferences and distillation: another task


def _optimizer(value: Any) -> Settings | None:
    name = OPTIMIZERS.get(value) if isinstance(value, str) else None
    return None if name is None else {"training.optim": name}


def _schedule(value: Any) -> Settings | None:
    name = str(value).rpartition(".")[2]
    name = re.sub(r"^get_|_schedule(_with_warmup)?$", "", name)  # torchtune names a function
    return {"training.lr_scheduler_type": name}


LORA: Settings = {"model.lora": {}}
RULES: dict[str, Callable[[Any], Settings | None]] = {
    "adapter": _either({"lora": LORA, "qlora": {**LORA, "model.quantization.type": "nf4"}}),
    "finetuning_type": _either({"lora": LORA, "full": {}}),
    "use_peft": _either({True: LORA, False: {}}),
    "lora_r": lambda value: {"model.lora.r": value},
    "lora_rank": lambda value: {"model.lora.r": value},
    "lora_target_modules": _modules,
    "lora_target": _modules,
    "lora_target_linear": _either({True: {"model.lora.target_modules": "all-linear"}, False: {}}),
    "load_in_4bit": _either({True: {"model.quantization.type": "nf4"}, False: {}}),
    "load_in_8bit": _either({True: {"model.quantization.type": "int8"}, False: {}}),
    "quantization_bit": _either({4: {"model.quantization.type": "nf4"}, 8: {"model.quantization.type": "int8"}}),
    "learning_rate": _number("training.learning_rate"),
    "lr": _number("training.learning_rate"),
    "max_steps": _count,
    "weight_decay": _decay,
    "optimizer.weight_decay": lambda value: {"training.weight_decay": value},  # torchtune's, of every parameter
    "optimizer": _optimizer,
    "optim": _optimizer,
    "optimizer._component_": _optimizer,
    "model._component_": _builder,
    "loss._component_": _loss,
    "quantizer._component_": _either({}),  # trains with rounded weights
    "model.quantize_base": _either({True: {"model.quantization.type": "nf4"}, False: {}}),
    "model.use_dora": lambda value: {"model.lora.use_dora": value},
    "lr_scheduler": _schedule,
    "lr_scheduler_type": _schedule,
    "lr_scheduler._component_": _schedule,
    "num_warmup_steps": lambda value: {"training.warmup_steps": value},
    "warmup_ratio": lambda value: {"training.warmup_steps": value or 0},
    "bf16": _either(
        {True: {"training.mixed_precision": "bf16"}, "auto": {"training.mixed_precision": "bf16"}, False: {}}
    ),
    "fp16": _either({False: {}}),
    "tf32": _either({False: {}}),
    "dtype": _either({"bf16": {"model.dtype": "bfloat16"}, "fp32": {"model.dtype": "float32"}}),
    "torch_dtype": _either({name: {"model.dtype": name} for name in ("bfloat16", "float32")}),
    "enable_activation_checkpointing": _either({True: {"backward.checkpointing": "full"}, False: {}}),
    "flash_attention": _either({True: {"model.attention": "flash_attention_2"}, False: {}}),
    **dict.fromkeys(
        ("packing", "sample_packing", "padding_free", "use_liger_kernel", "packed"),
        _either({True: {"policy": "lossless"}, False: {}}),
    ),
    "train_on_inputs": _either({True: {"dataset.train_on": "all"}, False: {}}),
    "assistant_only_loss": _either({True: {"dataset.format": "chat", "dataset.train_on": "assistant"}}),
    "completion_only_loss": _either({True: {"dataset.train_on": "assistant"}, False: {"dataset.train_on": "all"}}),
    "dataset_text_field": lambda value: {} if value == "text" else {"dataset.columns": {"text": value}},
    "datasets.path": lambda value: {"dataset.name": value},
    "datasets.name": lambda value: {"dataset.subset": value},
    "datasets.split": lambda value: {"dataset.split": value},
    "datasets.type": _either({name: {"dataset.format": known} for name, known in FORMATS.items()}),
    "dataset": lambda value: {"dataset.name": value} if isinstance(value, str) and "," not in value else None,
    "dataset.source": lambda value: {"dataset.name": value},
    "checkpointer.checkpoint_dir": lambda value: {"model.name": value},
    "max_seq_length": lambda value: {"dataset.max_seq_length": value},
    "max_samples": lambda value: {"dataset.max_examples": value},
    "val_set_size": _share,
    "val_size": _share,
    "test_size": _share,
    "per_device_eval_batch_size": lambda value: {"measure.per_device_eval_batch_size": value},
    "train_sampling_strategy": _either({"group_by_length": {"training.group_by": "length"}, "random": {}}),
    "stage": _either({"sft": {}}),
    "eval_strategy": _either({"steps": {}}),
    "save_strategy": _either({"steps": {}}),
    "load_best_model_at_end": _either({False: {}}),
    "metric_for_best_model": lambda value: {"checkpoint.keep_best": f"eval/{str(value).removeprefix('eval_')}"},
    "clip_grad_norm": _norm,
    "max_grad_norm": _norm,
}


def _nest(settings: Settings) -> dict[str, Any]:
    """Return the settings as a tree."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, leaf = key.split(".")
        part = tree
        for name in above:
            part = part.setdefault(name, {})
        if value == {}:
            part.setdefault(leaf, {})
        else:
            part[leaf] = value
    return tree


def _drop_wrong(recipe: dict[str, Any], left: dict[str, str]) -> dict[str, Any]:
    """Return the recipe without the values that its schema refuses; they are added to what was left out."""
    while wrong := _find_wrong(recipe):
        above, leaf, found = recipe, "", recipe
        for name in wrong.location:
            if isinstance(found, dict) and name in found:
                above, leaf, found = found, str(name), found[name]
        if isinstance(found, dict):
            left[wrong.key] = wrong.text  # keys that do not fit together: `sparsebp validate` refuses them, too
            break
        left[wrong.key] = f"{shorten(show(above.pop(leaf)), 40)}: {wrong.text}"
    return {key: value for key, value in recipe.items() if value != {}}


def _find_wrong(recipe: Mapping[str, Any]) -> FieldError | None:
    """Return the first error of the schema, which is asked with names in place of missing ones."""
    probe: dict[str, Any] = {"version": 1, "name": "x", **recipe}
    for part in ("model", "dataset"):
        probe[part] = {"name": "x"} | recipe.get(part, {})
    probe.pop("policy", None)  # its short form is the loader's
    try:
        Recipe.model_validate(probe)
    except ValidationError as error:
        return describe_errors(error, Recipe, probe)[0]
    return None


def _write(recipe: dict[str, Any], left: Mapping[str, str], needless: Sequence[str], file: Path) -> str:
    lines = [f"# Made from {' '.join(file.name.split())}."]
    given = recipe.get("training", {})
    lora = recipe.get("model", {}).get("lora")
    absent = [key for key in TELLING if key not in given and not (key == "num_train_epochs" and "max_steps" in given)]
    absent += [] if lora is None else [key for key in ("r", "lora_alpha", "target_modules") if key not in lora]
    absent += [] if "max_seq_length" in recipe.get("dataset", {}) else ["max_seq_length"]
    if absent:
        lines.append(f"# The file sets no {', '.join(absent)}: SparseBP's defaults hold, not the other tool's.")
    data = recipe.get("dataset", {})
    if data.get("eval_split") == data.get("split", "train"):
        lines.append(f"# All rows of the split {data['eval_split']} are trained: evaluations read some of them again.")
    elif not {"eval_split", "eval_fraction"} & set(data):
        lines.append("# The file says nothing on validation: SparseBP holds out 10 % of the rows (eval_fraction).")
    if recipe.get("policy") == "lossless":
        lines.append("# lossless skips padding; a batch has per_device_train_batch_size examples, not packed rows.")
    for part, key in (("model", "name"), ("dataset", "name"), ("dataset", "format")):
        if key not in recipe.get(part, {}):
            lines.append(f"# Missing: {part}.{key}")
    lines += ["version: 1", yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip()]
    if left:
        lines += ["", "# Not carried over:", *(f"#   {key}: {reason}" for key, reason in left.items())]
    if needless:
        lines += ["", f"# Recipes need none of these: {', '.join(needless)}"]
    return "\n".join(lines) + "\n"
