"""The engine's state in a checkpoint of ``transformers.Trainer``: one safetensors file, written atomically.

It uses no pickle: tensors are safetensors, the rest is JSON in the file's header, and a digest covers both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sparsebp_cli.errors import CheckpointError, UsageError
from sparsebp_cli.run import durable

_FORMAT = 1
_TENSOR = "__tensor__"


def save_state(file: Path, state: Mapping[str, object]) -> None:
    """Write a state of mappings, sequences, plain values and tensors. Raise CheckpointError if it cannot be written."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_split(state, tensors))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": str(_FORMAT), "state": text, "sha256": _digest(text, tensors)}
    try:
        # A safetensors file without tensors could not be distinguished from a damaged one.
        durable.write_file(file, save(tensors or {"": torch.zeros(1)}, header))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror or error}") from None


def load_state(file: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a state, with its tensors on a device. Raise CheckpointError if the file is missing or damaged."""
    if not file.exists():
        raise CheckpointError(
            f"cannot resume from {file.parent}: {file.name}, the state of the policies, is missing, because the "
            "checkpoint was saved without policies, with save_only_model, or with another number of processes; load "
            "the checkpoint's weights into the model and start a new train()"
        )
    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
            names = opened.keys()  # the file object is not iterable
            tensors = {name: opened.get_tensor(name) for name in names if name}
            if "" in names and opened.get_tensor("").view(torch.uint8).any():
                raise ValueError("the content does not match the checksum")
        text = header["state"]
        if header["format"] != str(_FORMAT) or header["sha256"] != _digest(text, tensors):
            raise ValueError("the content does not match the checksum")
        state: dict[str, Any] = _join(json.loads(text), {name: t.to(device) for name, t in tensors.items()})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); resume from another checkpoint") from None
    return state


def check_same(before: Mapping[str, object], now: Mapping[str, object], checkpoint: str) -> None:
    """Raise UsageError if the policies or options differ from a checkpoint's."""
    changes = [
        f"{name} was {before.get(name)!r}, got {now.get(name)!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise UsageError(
            f"{checkpoint} was trained with other policies: {'; '.join(changes)}; load the checkpoint's weights into "
            "the model and start a new train()"
        )


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}/".encode())
        # Hash bytes, since NumPy has no bfloat16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _split(value: object, tensors: dict[str, Tensor]) -> object:
    """Return the value with a number instead of every tensor, and add the tensors to ``tensors``."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        # Pairs, since JSON keys are only strings. An empty mapping stays a mapping, or it would come back as a list.
        return [[_split(key, tensors), _split(inner, tensors)] for key, inner in value.items()] or {}
    if isinstance(value, list | tuple):
        return {"list": [_split(inner, tensors) for inner in value]}
    return value


def _join(value: object, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return {_join(key, tensors): _join(inner, tensors) for key, inner in value}
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return [_join(inner, tensors) for inner in value["list"]] if "list" in value else {}
    return value
