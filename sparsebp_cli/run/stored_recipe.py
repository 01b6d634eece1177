"""Read the stored recipe of an earlier version, without validating it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

REGRESSION = "regression"  # a format of 0.5
SCHEDULE = "schedule"  # a key of 0.5, and the policy that its phases become
# Keys of 0.5 that are gone, with their defaults. Stored recipes are read without them.
GONE: dict[str, object] = {
    "backward.time_forms": False,
    "dataset.held_out": None,
    "dataset.policy_validation_examples": None,
    "dataset.weight_column": None,
    "measure.eval_batches": None,
    "measure.independent_examples": None,
    **dict.fromkeys(f"model.lora.{key}" for key in ("exclude_modules", "layers_pattern", "layers_to_transform")),
    **{f"model.lora.{key}": {} for key in ("alpha_pattern", "rank_pattern")},
    "model.quantization.bnb_4bit_compute_dtype": None,
    "model.quantization.bnb_4bit_use_double_quant": False,
    "model.lora.bias": "none",
    "model.lora.init_lora_weights": True,
    "model.lora.trainable_token_indices": None,
    "tracking.also": [],
    "tracking.code_diff": False,
    "training.max_cost": None,
    "training.max_seconds": None,
    "training.warmup_ratio": None,
}
# These had no effect on a run's weights and results, or rename_keys replaces them.
WITHOUT_EFFECT = {
    "backward.time_forms",
    "measure.eval_batches",
    "measure.independent_examples",
    "tracking.also",
    "tracking.code_diff",
}
# Options of targets that are gone, by kind. A run's weights and results do not depend on them.
GONE_OPTIONS = {
    "docker": ("gpu_request",),
    "kubernetes": ("backoff_limit", "gpu_resource", "nodes_as", "priority_class"),
    "slurm": ("qos",),
}
# Keys of 0.5 that named a column each, with the keys of ``columns`` that replace them, by format.
COLUMNS = {
    "text": {"text_column": "text"},
    "completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "chat": {},
    "classification": {"text_column": "text", "label_column": "label"},
}
FIRST_COLUMNS = ("text_column", "prompt_column", "completion_column", "label_column")
OLD_DATASET_KEYS = (*FIRST_COLUMNS, "text_pair_column", "group_column", "completion_only_loss")
OLD_KEYS = [
    f'"{key}"'.encode()
    for key in (
        *("engine", REGRESSION, SCHEDULE, *OLD_DATASET_KEYS),
        *(path.rpartition(".")[2] for path in GONE),
        *(key for keys in GONE_OPTIONS.values() for key in keys),
    )
]
MARK = ", with a key of 0.5, "  # in the name of a split: the run can be shown and compared, but not trained further


def is_dense(recipe: Mapping[str, Any]) -> bool:
    """Return whether a stored recipe trains without a policy."""
    return all(entry["name"] == "dense" for entry in recipe["policy"])


def rename_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with its keys renamed to this version's.

    Up to 0.2, ``backward.execution`` was ``engine``. Keys that are gone are left out. If one had an effect on the
    weights, the name of the split says so. ``schedule`` had phases with a policy each.
    """
    known: dict[str, Any] = deepcopy(_fold_schedule(recipe))
    if isinstance(backward := known.get("backward"), dict) and "engine" in backward:
        backward["execution"] = backward.pop("engine")
    _replace_batches(known)
    _replace_ratio(known.get("training"))
    _drop_options(known.get("target"))
    dataset = known.get("dataset")
    if isinstance(dataset, dict) and dataset.get("format") == REGRESSION:
        dataset |= {
            "format": "classification",
            "split": f"{dataset.get('split', 'train')}{MARK}dataset.format: {REGRESSION}",
        }
    if isinstance(dataset, dict):
        _fold_columns(dataset)
    for path, default in GONE.items():
        place, _, key = path.rpartition(".")
        if key not in (part := find_section(known, place)):
            continue
        value = part.pop(key)
        if value != default and path not in WITHOUT_EFFECT and isinstance(dataset, dict):
            dataset["split"] = f"{dataset.get('split', 'train')}{MARK}{path}: {json.dumps(value)}"
    return known


def find_section(recipe: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a section of a recipe by its dotted path; empty if it is absent or null."""
    for name in path.split("."):
        recipe = part if isinstance(part := recipe.get(name), dict) else {}
    return recipe


def _replace_batches(recipe: dict[str, Any]) -> None:
    """Count evaluated examples instead of batches, which all processes had."""
    try:
        batches, training = recipe["measure"]["eval_batches"], recipe["training"]
        processes = recipe["target"].get("processes") or 1
        if batches is not None and recipe["measure"].get("eval_examples") is None:
            recipe["measure"]["eval_examples"] = batches * training["per_device_train_batch_size"] * processes
    except (LookupError, TypeError, AttributeError):
        return  # it has no such key, or the next reader refuses it


def _replace_ratio(training: Any) -> None:
    """Turn ``warmup_ratio`` into a fraction in ``warmup_steps``."""
    if isinstance(training, dict) and training.get("warmup_ratio") is not None:
        training["warmup_steps"] = training.pop("warmup_ratio") or 0  # a ratio of 0.0 is no warm-up


def _fold_columns(dataset: dict[str, Any]) -> None:
    """Move names of columns into ``columns``, and ``completion_only_loss`` into ``train_on``. Drop those of another
    format, which had no effect."""
    old = {key: dataset.pop(key) for key in OLD_DATASET_KEYS if key in dataset}
    known = {**COLUMNS.get(str(dataset.get("format", "text")), {}), "group_column": "group"}
    named = {part: old[key] for key, part in known.items() if old.get(key) not in (None, part)}
    if old.get("text_pair_column") is not None:
        named["text"] = [old.get("text_column", "text"), old["text_pair_column"]]
    columns = dataset.get("columns") or {}
    if named and isinstance(columns, dict):
        dataset["columns"] = columns | named
    if dataset.get("format") == "completion" and not old.get("completion_only_loss", True):
        dataset["train_on"] = "all"


def unfold_columns(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataset section with the keys of 0.5, for the hash of its groups."""
    columns = dict(dataset["columns"])
    known = {**COLUMNS[dataset["format"]], "group_column": "group"}
    old = {key: key.removesuffix("_column") for key in FIRST_COLUMNS}
    old |= {key: columns.pop(part) for key, part in known.items() if part in columns}
    if isinstance(old["text_column"], list):
        old["text_column"], old["text_pair_column"] = old["text_column"]
    trains_prompts = dataset["format"] == "completion" and dataset["train_on"] == "all"
    rest = {"columns": columns, "train_on": "assistant"} if trains_prompts else {"columns": columns}
    return {**dataset, **old, **rest, "completion_only_loss": not trains_prompts}


def _drop_options(target: Any) -> None:
    """Drop removed options of a target. ``qos`` becomes an option of sbatch."""
    if not isinstance(target, dict):
        return  # the next reader refuses it
    for key in GONE_OPTIONS.get(str(target.get("kind")), ()):
        value = target.pop(key, None)
        if key == "qos" and value:
            target["arguments"] = [*target.get("arguments", []), f"--qos={value}"]


def _fold_schedule(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe without ``schedule``, a key of 0.5. Its phases become a policy that is not installed: such
    a run can be shown and compared, but does not go on. Leave a damaged schedule for the next reader to refuse."""
    rest = {key: value for key, value in recipe.items() if key != SCHEDULE}
    if not (phases := recipe.get(SCHEDULE)):
        return rest
    try:
        is_whole = all(isinstance(entry["name"], str) for phase in phases for entry in phase["policy"])
    except (LookupError, TypeError):
        is_whole = False
    return {**rest, "policy": [{"name": SCHEDULE, "phases": phases}]} if is_whole else dict(recipe)
