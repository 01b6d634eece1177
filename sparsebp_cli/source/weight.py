"""Check the files next to a model's config.json that decide what is read: adapters, the weight index, headers.

The checks run before a library opens any of these files. An index can name files of other formats and in other folders,
an adapter names another model, and a config can describe a model that fits into no memory.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, open_regular, read_json

LARGEST_JSON = 256 * 1024 * 1024
LARGEST_HEADER = 100_000_000  # bytes in a safetensors header; the library itself refuses larger ones
INDEX = "model.safetensors.index.json"
# Config keys for sizes (at most the longest side of a tensor), and for numbers of modules.
SIZES: tuple[str, ...] = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
    "num_labels",
    "num_attention_heads",
)
SIZES += ("num_key_value_heads", "n_embd", "n_inner", "n_head", "n_positions", "d_model", "d_ff", "ffn_dim")
COUNTS: tuple[str, ...] = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
COUNTS += ("num_decoder_layers", "num_experts", "num_local_experts", "n_routed_experts")
ALWAYS_ALLOWED = 256  # layers may share their tensors
# Limits for a config without weights beside it. Llama 3.1 405B has 126 layers and an inner width of 53,248; Gemma 3 has
# 262,208 tokens.
LARGEST_SIZE, LARGEST_COUNT = 2**22, 2**13
# Architectures have further names for tensor sides and counts. Llama 4 has 10,485,760 positions; positions that are not
# learned cost nothing.
FURTHER_SIZE = re.compile(
    r"(^|_)(size|sizes|dim|dims|width|widths|rank|heads|state|channels|features|groups|ff|inner|embd|ctx|input|labels)$"
)
FURTHER_COUNT = re.compile(r"(^|_)(layers?|blocks?|depths?|stages|repeats?)$")
POSITIONS, MOST_POSITIONS = re.compile(r"position"), 2**25
EXPERTS, MOST_EXPERTS = re.compile(r"experts$"), 2**16  # Doge has 16,384


def check_weights(folder: Path, config: Mapping[str, object]) -> None:
    """Raise DataError if a model folder points to other files, or its config asks for more than its weights hold."""
    if (folder / "adapter_config.json").exists():
        raise DataError(f"{folder}: is an adapter (adapter_config.json), not a model; give its base model instead")
    check_sidecars(folder)
    shapes = [shape for name in _name_files(folder) for shape in _read_shapes(folder / name)]
    refuse_absurd(config, str(folder / "config.json"))
    if shapes:
        longest = max((side for shape in shapes for side in shape), default=0)
        beside, source = "to fit the weights in its folder", str(folder / "config.json")
        _refuse_larger(
            source, config, SIZES, max(longest, ALWAYS_ALLOWED), f"{beside} (by the longest side of a tensor)"
        )
        _refuse_larger(source, config, COUNTS, max(len(shapes), ALWAYS_ALLOWED), f"{beside} (by the number of tensors)")


def check_sidecars(folder: Path) -> None:
    """Raise DataError if settings in a model or tokenizer folder name code or are too large."""
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.model")]):
        if file.exists() and not file.is_file():  # opening a pipe may block for ever, and a device may never end
            raise DataError(f"{file}: is not a regular file")
        if file.exists() and not os.access(file, os.R_OK):  # safetensors would say that it does not exist
            raise DataError(f"{file}: cannot be read: permission denied")
        if file.suffix == ".json" and file.is_file() and file.stat().st_size > LARGEST_JSON:
            raise DataError(f"{file}: must have at most {LARGEST_JSON} bytes, got {file.stat().st_size}")
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in _read_object(settings):
        raise DataError(f"{settings}: 'auto_map' is not allowed, because it can run code from outside of transformers")


def refuse_absurd(config: Mapping[str, object], source: str) -> None:
    """Raise DataError if a config has more layers, experts or units than any real model: building it would fill the
    memory. Errors name ``source``."""
    place = f"{source}: " if source else ""
    for name, number in _numbers(config):
        most = LARGEST_SIZE
        if EXPERTS.search(name):
            most = MOST_EXPERTS
        elif name in COUNTS or (name not in SIZES and FURTHER_COUNT.search(name)):
            most = LARGEST_COUNT
        elif POSITIONS.search(name):
            most = MOST_POSITIONS
        elif name not in SIZES and not FURTHER_SIZE.search(name):
            continue
        if number > most:
            raise DataError(f"{place}{name} must be at most {most} for any model, got {shorten(str(number))}")
        if number < 0 and name in SIZES + COUNTS:
            raise DataError(f"{place}{name} must be at least 0, got {shorten(str(number))}")


def _name_files(folder: Path) -> list[str]:
    """Return the names of the weight files. Each must be a safetensors file in the folder itself."""
    index = folder / INDEX
    if not index.is_file():
        return [name for name in ("model.safetensors",) if (folder / name).is_file()]
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise DataError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise DataError(f"{index}: must name only safetensors files in the same folder, got {shorten(str(name))!r}")
    return sorted({name for name in names.values() if (folder / name).is_file()})


def _read_object(file: Path) -> dict[str, object]:
    try:
        content = read_json(file, LARGEST_ARTIFACT)
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{file}: must be a JSON object")
    return content


def _read_shapes(file: Path) -> Iterator[list[int]]:
    """Yield the shapes in a safetensors header. Yield none if it is damaged, which safetensors reports itself. Raise
    DataError if the header is longer than its file or the limit."""
    try:
        with open_regular(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            largest = min(LARGEST_HEADER, file.stat().st_size - 8)
            if length > largest:
                raise DataError(f"{file}: its header must have at most {largest} bytes, got {length}")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError, struct.error):
        return
    for name, entry in header.items() if isinstance(header, dict) else ():
        shape = entry.get("shape") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(shape, list) and all(isinstance(side, int) for side in shape):
            yield shape


def _refuse_larger(source: str, config: Mapping[str, object], keys: tuple[str, ...], most: int, what: str) -> None:
    for name, number in _numbers(config):
        if name in keys and number > most:
            raise DataError(f"{source}: {name} must be at most {most} {what}, got {shorten(str(number))}")


def _numbers(config: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield every number of a config with its name, including those in inner configs and lists."""
    for name, value in config.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, dict):
                yield from _numbers(one)
            elif isinstance(one, int | float):
                yield str(name), one
