"""Capturing and restoring the global random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def get_state(device: torch.device) -> Tensor:
    """Return the state of the global generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the global generator of a device."""
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


@contextmanager
def generators_at(states: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """Run the block with the global generators in states from :func:`capture_generators`, and restore them
    afterwards.
    """
    before = capture_generators(device)
    try:
        _put(states, device)
        yield
    finally:
        _put(before, device)


def capture_generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of the CPU generator, and of the device's if it has its own."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _put(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
