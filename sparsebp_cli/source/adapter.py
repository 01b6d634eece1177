"""Check a folder with a peft adapter (type, keys, weights) before a library reads it.

An adapter's config names a base model, a library to import its class from, and options by which peft imports others.
SparseBP follows none of these. The recipe names the base, and only the options of a known type are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparsebp_cli.errors import DataError
from sparsebp_cli.policy.composition import ADAPTER_TYPES, find_adapter_options
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.source.model import LARGEST_CONFIG, read_object
from sparsebp_cli.source.name import MODELS, find_source
from sparsebp_cli.source.weight import check_sidecars

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INSIDE = "adapter"  # the subfolder of a run's model folder that holds the adapter merged into the model
# With these keys peft imports a library that the file names, or requires its own pass over the data.
LEADING = ("megatron_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "arrow_config")


def find_adapter(name: str, base: str | None = None) -> Path:
    """Return the folder of an adapter: a peft folder, or the adapter inside a run's model folder. Raise DataError if
    there is none, or if the adapter is already merged into the model ``base``."""
    source = find_source(name, MODELS)
    if not isinstance(source, Path):
        raise DataError(f"{name}: must be a folder with {CONFIG}")
    folder = source if (source / CONFIG).is_file() else source / INSIDE
    if not (folder / CONFIG).is_file():
        raise DataError(
            f"{name}: must be the folder of a peft adapter, but neither it nor its folder {INSIDE} has {CONFIG}"
        )
    if base is not None and find_source(base, MODELS) == folder.parent:
        raise DataError(
            f"{name}: this adapter is already merged into the model {base}; give the adapter's original base model as "
            "model.name"
        )
    return folder


def read_adapter(folder: Path) -> Mapping[str, object]:
    """Return the checked content of an adapter's config. Raise DataError if it is incomplete, of an unknown type, or
    has keys by which peft would import or read other files."""
    check_sidecars(folder)
    content = read_object(folder / CONFIG, LARGEST_CONFIG)
    if content is None:
        raise DataError(f"{folder}: no readable {CONFIG}")
    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder}: no {WEIGHTS}")
    kind = str(content.get("peft_type", "")).lower()
    if kind not in ("lora", *ADAPTER_TYPES) or not find_adapter_options(kind):
        allowed = ", ".join(("lora", *ADAPTER_TYPES))
        raise DataError(f"{folder / CONFIG}: peft_type must be one of {allowed}, got {shorten(kind)!r}")
    for key in LEADING:
        if content.get(key):
            raise DataError(f"{folder / CONFIG}: {key} is not allowed: peft would import or read what this key names")
    return content
