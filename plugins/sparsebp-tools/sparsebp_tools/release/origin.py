"""Restore in a trained model's files what training or a library changed relative to the source model.

Other programs have their own conventions: vLLM and llama.cpp know keys that a newer transformers writes under other
names. Switches of training, such as a disabled cache, would otherwise stay in the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import ModelSection
from sparsebp_cli.source import MODELS, find_source
from sparsebp_cli.source.model import LARGEST_CONFIG, LARGEST_TOKENIZER, read_object
from sparsebp_cli.source.name import hub_folder

CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
# Entries of transformers 5 about how a tokenizer was loaded here.
LOADED_HERE = ("backend", "is_local", "local_files_only", "name_or_path")
PLAIN_TOKENIZER = "PreTrainedTokenizerFast"  # reads tokenizer.json unchanged; transformers 4 and 5 know the name
OWN_NAME = "TokenizersBackend"  # transformers 5 writes it, but older readers do not know it
# Keys of the source that do not describe the trained model: storage, code, and the head.
NOT_TAKEN = {"quantization_config", "auto_map", "transformers_version", "torch_dtype", "dtype", "architectures"}
NOT_TAKEN |= {"id2label", "label2id", "num_labels", "problem_type"}
LARGEST_VOCABULARY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Origin:
    """The files of a recipe's model and tokenizer that are on this machine."""

    model: Path | None = None
    tokenizer: Path | None = None
    config: Mapping[str, Any] | None = None  # of the model; None if unknown
    used: Mapping[str, Any] = field(default_factory=dict)  # the recipe's settings that a config stores

    @classmethod
    def find(cls, section: ModelSection) -> Origin:
        """Find the files of a recipe's model. Nothing is downloaded."""
        model = _find_folder(section.name)
        tokenizer = _find_folder(section.tokenizer) if section.tokenizer is not None else model
        config = section.config
        if config is None and model is not None:
            config = read_object(model / CONFIG, LARGEST_CONFIG)
        return cls(model, tokenizer, config, {} if section.dropout is None else {"dropout": section.dropout})


def _find_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    try:
        found = find_source(name, MODELS)
        found = found() if callable(found) else found
    except DataError:
        return None
    return found if isinstance(found, Path) else hub_folder(name, "models")


def restore_config(saved: Mapping[str, Any], origin: Origin, labels: Sequence[str]) -> dict[str, Any]:
    """Return a saved config as in its source, for a model with these class names."""
    source = origin.config or {}
    found = _drop_private(saved)
    if origin.config is not None:
        if "dropout" in origin.used:
            _restore_dropouts(found, source)
        found |= {key: value for key, value in _drop_private(source).items() if key not in {*found, *NOT_TAKEN}}
    if not found.get("use_cache", True):  # disabled during training
        if source.get("use_cache") is None:
            del found["use_cache"]
        else:
            found["use_cache"] = source["use_cache"]
    if (dtype := saved.get("dtype", saved.get("torch_dtype"))) is not None:
        found |= {"dtype": dtype, "torch_dtype": dtype}  # older readers know the second name
    rope = found.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_theta" in rope and rope.get("rope_type") == "default":
        found.setdefault("rope_theta", rope["rope_theta"])  # older readers expect it here
    if len(labels) > 1:
        found["id2label"] = {str(number): str(name) for number, name in enumerate(labels)}
        found["label2id"] = {str(name): number for number, name in enumerate(labels)}
    return dict(sorted(found.items()))


def _drop_private(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _restore_dropouts(config: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Restore each dropout probability from the source, which may leave it to the class."""
    for key, value in list(config.items()):
        if isinstance(value, dict):
            of_source = source.get(key)
            _restore_dropouts(value, of_source if isinstance(of_source, Mapping) else {})
        elif isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            if key in source:
                config[key] = source[key]
            else:
                del config[key]


def restore_generation(saved: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a saved generation config without what training switched off."""
    found = dict(saved)
    if found.get("use_cache") is False:
        known = (read_object(origin.model / GENERATION, LARGEST_CONFIG) if origin.model is not None else None) or {}
        found |= {"use_cache": known["use_cache"]} if "use_cache" in known else {}
        if "use_cache" not in known:
            del found["use_cache"]
    return found


def restore_tokenizer(saved: Mapping[str, Any], inner: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a saved tokenizer config with the class of the source, if it has the source's tokens. ``inner`` is the
    content of ``tokenizer.json``; empty without one."""
    found = {key: value for key, value in saved.items() if key not in LOADED_HERE}
    if not inner or found.get("tokenizer_class") != OWN_NAME:
        return found
    known, config = _read_tokenizer(origin), None
    if origin.tokenizer is not None and known is not None and _is_same(inner, known):
        config = read_object(origin.tokenizer / TOKENIZER_CONFIG, LARGEST_CONFIG)
    found["tokenizer_class"] = str((config or {}).get("tokenizer_class") or PLAIN_TOKENIZER)
    if found["tokenizer_class"] == OWN_NAME:
        found["tokenizer_class"] = PLAIN_TOKENIZER
    return found


def restore_limits(inner: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with the truncation and padding of its source, which training overwrites."""
    known = _read_tokenizer(origin) or {}
    return {**inner, "truncation": known.get("truncation"), "padding": known.get("padding")}


def find_vocabularies(inner: Mapping[str, Any], origin: Origin) -> list[Path]:
    """Return the source's sentencepiece vocabularies, which llama.cpp reads and transformers 5 does not save; none if
    the tokens have changed."""
    if origin.tokenizer is None:
        return []
    known = _read_tokenizer(origin)
    if known is not None and inner and not _is_same(inner, known):
        return []
    files = sorted(origin.tokenizer.glob("*.model"))
    return [file for file in files if file.is_file() and file.stat().st_size <= LARGEST_VOCABULARY]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    return dict(read_object(path, LARGEST_TOKENIZER) or {})


def _read_tokenizer(origin: Origin) -> Mapping[str, Any] | None:
    return None if origin.tokenizer is None else read_object(origin.tokenizer / TOKENIZER, LARGEST_TOKENIZER)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two tokenizers produce the same tokens for every text of any length."""
    limits = ("truncation", "padding")
    texts = (json.dumps({k: v for k, v in each.items() if k not in limits}, sort_keys=True) for each in (one, other))
    return next(texts) == next(texts)
