"""Build the model and its tokenizer: safetensors only, no remote code, no second way when the first is refused."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.recipe.schema import LoraSection, ModelSection
from sparsebp_cli.worker.float8 import convert_to_float8

MODELS = "sparsebp.models"


def find_source(name: str, group: str) -> str | Path | Any:
    """Find what a name in a recipe stands for.

    Args:
        name: An installed name, ``package:PACKAGE/PATH``, a local path or a hub id.
        group: Entry-point group of installed names.

    Returns:
        The loaded entry point, a path that exists, or the hub id as it was.

    Raises:
        DataError: A path or package does not exist, or the entry point is broken.
    """
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:
                raise DataError(f"{name} ({entry.value}) is broken: {type(error).__name__}: {error}") from None
    if name.startswith("package:"):
        return _inside_package(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise DataError(f"{name}: no such file or folder")
    return name


def _inside_package(name: str) -> Path:
    package, _, inside = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{name}: there is no installed package {package!r}")
    root = Path(spec.submodule_search_locations[0]).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root) or not path.exists():
        raise DataError(f"{name}: the package has no {inside!r}")
    return path


def build_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe's model.

    Args:
        section: The recipe's model.

    Returns:
        The tokenizer, with a padding token.

    Raises:
        DataError: It cannot be found or loaded.
    """
    source = _folder_or_id(section.tokenizer or section.name or "")
    revision = None if section.tokenizer else section.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer {source}: {_first_line(error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.unk_token
    return tokenizer


def build_model(section: ModelSection, tokenizer: PreTrainedTokenizerBase, num_labels: int | None) -> PreTrainedModel:
    """Build a recipe's model, with its weights or with random ones.

    Args:
        section: The recipe's model.
        tokenizer: Its size is the vocabulary of a config that names none.
        num_labels: Classes of a classification; None for language modelling.

    Returns:
        The model in training mode, adapters included.

    Raises:
        DataError: It cannot be found, is no safetensors, or wants remote code.
    """
    auto: Any = AutoModelForCausalLM if num_labels is None else AutoModelForSequenceClassification
    options: dict[str, Any] = {"dtype": getattr(torch, section.dtype), "attn_implementation": section.attention}
    labels = {} if num_labels is None else {"num_labels": num_labels}
    try:
        if section.config is not None:
            config = _random_config(section.config, len(tokenizer), labels)
            model = auto.from_config(config, **options)
        else:
            source = _folder_or_id(section.name or "")
            _refuse_hostile(source)
            model = auto.from_pretrained(
                source, revision=section.revision, trust_remote_code=False, use_safetensors=True, **options, **labels
            )
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise DataError(f"model {section.name or section.config}: {_first_line(error)}") from None
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    if section.float8 is not None:
        convert_to_float8(model, section.float8)
    if section.lora is not None:
        model = _with_adapters(model, section.lora, num_labels)
    trained: PreTrainedModel = model.train()
    return trained


def _folder_or_id(name: str) -> str | Path:
    source = find_source(name, MODELS)
    return source() if callable(source) else source


def _random_config(values: dict[str, Any], vocab_size: int, labels: dict[str, int]) -> Any:
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise DataError(f"config.model_type: unknown {model_type!r}{did_you_mean(model_type, CONFIG_MAPPING.keys())}")
    known = AutoConfig.for_model(model_type).to_dict()
    for key in values:
        if key not in known:
            raise DataError(f"config.{key}: a {model_type} has no such setting{did_you_mean(key, known)}")
    return AutoConfig.for_model(**({"vocab_size": vocab_size} | values | labels))


def _refuse_hostile(source: str | Path) -> None:
    if not isinstance(source, Path):
        return
    try:
        config = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: no readable config.json ({_first_line(error)})") from None
    for key in config:
        if key == "auto_map" or (key.startswith("_") and key != "_name_or_path"):
            raise DataError(f"{source}/config.json: refused, because {key!r} can make other code run")


def _with_adapters(model: PreTrainedModel, section: LoraSection, num_labels: int | None) -> Any:
    from peft import LoraConfig, get_peft_model

    task = "CAUSAL_LM" if num_labels is None else "SEQ_CLS"
    try:
        return get_peft_model(model, LoraConfig(task_type=task, **section.model_dump()))
    except ValueError as error:
        raise DataError(f"model.lora: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
