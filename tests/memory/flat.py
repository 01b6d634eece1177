"""What a training must not gather from step to step: tensors, classes, and entries of registries of the process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sparsebp_cli as sbp
from tests.backward.conftest import tiny_model

ROUND = 4  # steps after which shapes begin again
ROWS = 4


def gathered() -> dict[str, int]:
    """Count what lives now."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(found), Tensor) for found in objects),
        # Without those of ctypes: safetensors has one for each number of bytes that a tensor was saved with.
        "classes": sum(issubclass(type(found), type) and not issubclass(found, _OF_CTYPES) for found in objects),
        "pytree": len(pytree.SUPPORTED_NODES) + len(pytree.CONSTANT_NODES),
        "attention": len(ALL_ATTENTION_FUNCTIONS) + len(ALL_MASK_ATTENTION_FUNCTIONS),
        "callables": sum(issubclass(type(found), _FUNCTIONS) for found in objects),
    }


_FUNCTIONS = (type(gathered), type(gc.collect))
_OF_CTYPES = (ctypes.Array, ctypes._Pointer)


def batch(number: int) -> dict[str, Tensor]:
    """Return the arguments of step ``number``, whose shape is that of few others."""
    generator = torch.Generator().manual_seed(number % ROUND)
    ids = torch.randint(3, 60, (ROWS, 10 + number % ROUND), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    ids = ids * mask
    labels = ids.masked_fill((mask == 0) | (torch.arange(ids.shape[1]) < 4), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def count_while_training(policy: Mapping[str, Any], options: Mapping[str, Any], at: Sequence[int]) -> list[Any]:
    """Train a tiny model, and return what lives after some steps."""
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = []
    with sbp.attach(model, dict(policy), optimizer=optimizer, num_steps=10 * at[-1], **options) as engine:
        for number in range(1, at[-1] + 1):
            given = batch(number)
            if "reference" in options:
                given["reference_loss"] = torch.zeros(given["labels"].shape)
            _step(model, engine, given)
            optimizer.step()
            optimizer.zero_grad()
            engine.report()
            del given
            if number in at:
                found.append(gathered())
    return found


def _step(model: Any, engine: Any, given: dict[str, Tensor]) -> None:
    forward: Callable[[], Tensor] = lambda: model(**given).loss  # noqa: E731
    if engine.trials_are_due():
        engine.run_trials(forward, others=[forward])
    engine.backward(forward())
