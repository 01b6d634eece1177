"""Check the files of a model: whether it can be loaded, its longest sequence, and its vocabulary size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sparsebp_cli.errors import DataError

LONGEST = ("max_position_embeddings", "n_positions")  # the second is GPT-2's name for the first
# Underscore keys set private attributes of transformers. Allow only those below to be text, because text can select
# code: `_attn_implementation` can name code from a repository. Numbers select no code.
HARMLESS = ("_name_or_path", "_model_name_or_path", "_diffusers_version")
BUILT_IN = {"_attn_implementation": ("eager", "sdpa"), "_attn_implementation_internal": ("eager", "sdpa")}
LARGEST_CONFIG = 4 * 1024 * 1024
LARGEST_TOKENIZER = 32 * 1024 * 1024
TOKENIZER_WORDS = ("token", "vocab", "spiece", "bpe", ".model")


def read_config(folder: Path) -> dict[str, object]:
    """Return a model's config.json. Raise DataError if it is missing, no JSON object, or can run code."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with config.json and safetensors files, got a file")
    config = read_object(file, LARGEST_CONFIG)
    if config is None:
        if (folder / "adapter_config.json").is_file() and not file.exists():
            raise DataError(f"{folder}: is an adapter: give its base model here, and this folder as model.adapter")
        raise DataError(f"{folder}: no readable config.json")
    _refuse_code(file, config)
    return config


def _refuse_code(file: Path, config: Mapping[str, object]) -> None:
    for key, value in config.items():
        is_plain = value is None or isinstance(value, bool | int | float) or value in BUILT_IN.get(key, ())
        if key == "auto_map" or (key.startswith("_") and key not in HARMLESS and not is_plain):
            raise DataError(f"{file}: {key!r} is not allowed, because it can run code from outside of transformers")
        if isinstance(value, dict):  # the config of a submodel
            _refuse_code(file, value)


def read_object(file: Path, largest: int) -> dict[str, object] | None:
    """Return the JSON object in a file; None if it has none or is larger than ``largest`` bytes."""
    try:
        if not file.is_file() or file.stat().st_size > largest:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_files(folder: Path, *, has_tokenizer: bool) -> None:
    """Raise DataError if a folder lacks safetensors weights or, if ``has_tokenizer``, a tokenizer."""
    names = [file.name for file in folder.iterdir()]
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise DataError(f"{folder}: no weights in safetensors; found {', '.join(sorted(names)[:10]) or 'nothing'}")
    if has_tokenizer:
        check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raise DataError if a folder cannot contain a tokenizer."""
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with a tokenizer, got a file")
    names = sorted(file.name for file in folder.iterdir())
    if not any(word in name for name in names for word in TOKENIZER_WORDS):
        raise DataError(f"{folder}: no tokenizer files; found {', '.join(names[:10]) or 'nothing'}")


def refuse_too_long(config: Mapping[str, object], max_seq_length: int) -> None:
    """Raise DataError if ``max_seq_length`` exceeds the number of positions in a model's config."""
    text = config.get("text_config")
    known = {**config, **text} if isinstance(text, Mapping) else config
    longest = next((value for name in LONGEST if isinstance(value := known.get(name), int)), None)
    if longest is not None and max_seq_length > longest:
        raise DataError(f"must be at most {longest} for this model, got {max_seq_length}")


def refuse_mismatch(num_tokens: int, num_rows: int) -> None:
    """Raise DataError if a tokenizer has more tokens (with added ones) than the model's embedding has rows."""
    if num_tokens > num_rows:
        raise DataError(
            f"the tokenizer has {num_tokens} tokens, but the model's embedding has only {num_rows} rows: give the "
            "model's tokenizer"
        )


def count_tokens(folder: Path) -> int | None:
    """Return a tokenizer's number of tokens, with added ones; None if its files do not tell."""
    content = read_object(folder / "tokenizer.json", LARGEST_TOKENIZER)
    model = (content or {}).get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if content is None or not isinstance(vocabulary, dict):
        return None
    tokens = content.get("added_tokens")
    added = [token for token in (tokens if isinstance(tokens, list) else []) if isinstance(token, dict)]
    return len(set(vocabulary) | {str(token.get("content")) for token in added})
