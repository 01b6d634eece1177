"""What the files of a model tell: whether it can be loaded, how long its sequences are, how many tokens it knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import DataError

LONGEST = ("max_position_embeddings", "n_positions")  # the second is GPT-2's word for the first
LARGEST_CONFIG = 4 * 1024 * 1024
LARGEST_TOKENIZER = 32 * 1024 * 1024
TOKENIZER_WORDS = ("token", "vocab", "spiece", "bpe", ".model")


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's config.json, as far as it is harmless.

    Args:
        folder: The model's.

    Returns:
        What it says.

    Raises:
        DataError: There is none, it is no JSON object, or it can make other code run.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with config.json and safetensors, got a file")
    config = read_object(file, LARGEST_CONFIG)
    if config is None:
        raise DataError(f"{folder}: no readable config.json")
    _refuse_code(file, config)
    return config


def _refuse_code(file: Path, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key == "auto_map" or (key.startswith("_") and key != "_name_or_path"):
            raise DataError(f"{file}: refused, because {key!r} can make other code run")
        if isinstance(value, dict):  # the settings of a part
            _refuse_code(file, value)


def read_object(file: Path, largest: int) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where it is none, or larger than that."""
    try:
        if not file.is_file() or file.stat().st_size > largest:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def check_files(folder: Path, *, has_tokenizer: bool) -> None:
    """Look whether the files are there without which a model cannot be loaded.

    Args:
        folder: The model's.
        has_tokenizer: Whether its tokenizer is to be there as well.

    Raises:
        DataError: Something is missing.
    """
    names = [file.name for file in folder.iterdir()]
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise DataError(f"{folder}: no weights in safetensors; it has {', '.join(sorted(names)[:10]) or 'nothing'}")
    if has_tokenizer:
        check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Look whether a folder can hold a tokenizer.

    Args:
        folder: Where it should be.

    Raises:
        DataError: It cannot.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with a tokenizer, got a file")
    names = sorted(file.name for file in folder.iterdir())
    if not any(word in name for name in names for word in TOKENIZER_WORDS):
        raise DataError(f"{folder}: no tokenizer; it has {', '.join(names[:10]) or 'nothing'}")


def refuse_too_long(config: Mapping[str, Any], max_seq_length: int) -> None:
    """Refuse sequences that are longer than a model's positions.

    Args:
        config: The model's, or the values of it that are known.
        max_seq_length: The recipe's.

    Raises:
        DataError: They are.
    """
    text = config.get("text_config")
    known = {**config, **text} if isinstance(text, Mapping) else config
    longest = next((known[name] for name in LONGEST if isinstance(known.get(name), int)), None)
    if longest is not None and max_seq_length > longest:
        raise DataError(f"must be at most {longest} for this model, got {max_seq_length}")


def refuse_mismatch(num_tokens: int, num_rows: int) -> None:
    """Refuse a tokenizer with more tokens than a model's embedding has rows.

    Args:
        num_tokens: Of the tokenizer, added ones included.
        num_rows: Of the embedding.

    Raises:
        DataError: It has.
    """
    if num_tokens > num_rows:
        raise DataError(f"the tokenizer has {num_tokens} tokens, the model's embedding {num_rows} rows: not a pair")


def count_tokens(folder: Path) -> int | None:
    """Return how many tokens a tokenizer knows, added ones included; None where its files do not tell."""
    content = read_object(folder / "tokenizer.json", LARGEST_TOKENIZER)
    model = (content or {}).get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if content is None or not isinstance(vocabulary, dict):
        return None
    added = [token for token in content.get("added_tokens") or [] if isinstance(token, dict)]
    return len(set(vocabulary) | {str(token.get("content")) for token in added})
