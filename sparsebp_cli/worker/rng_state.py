"""Capture and restore the state of a process's global random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """Return the state of every global random generator."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
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
