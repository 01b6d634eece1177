"""Returning a model to the state before a trial pass: random generators, buffers and gradients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


class Rewind:
    """A copy of the state that a model's passes change, besides parameters: random generators, buffers, gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._rng = model, capture_rng()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._gradients = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}

    def start(self) -> None:
        """Restore the state without gradients, for the next pass."""
        restore_rng(self._rng)
        for parameter in self._model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def finish(self) -> None:
        """Restore the state, including gradients."""
        self.start()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers that the passes of the block change, such as those of spectral norm."""
    tracked = [buffer for buffer in model.buffers() if not buffer.is_inference()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in tracked]  # noqa: SLF001 - its only way
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:  # noqa: SLF001 - writing to others would break graphs that saved them
                    buffer.copy_(before)


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random generator."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    # Lists of numbers, because a checkpoint's JSON cannot store tuples or arrays.
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore every global random generator from the result of :func:`capture_rng`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
