"""Models and steps whose memory can be calculated by hand, and how their curves are read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_tools.memory import MemoryCurve, MemorySplit, MemoryTrace, memory_trace

FLOAT, ROWS = 4, 32
WIDTHS = (8, 16, 4, 64)


def stack(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=dtype) for a, b in pairwise(WIDTHS)))


def trace_step(model: nn.Module, optimizer: Any, run: Callable[[], object]) -> MemoryTrace:
    with memory_trace(model, optimizer) as trace:
        run()
    return trace


def one_pass(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run


def in_order(curve: MemoryCurve, part: str) -> list[int]:
    """A part's bytes, each value once as long as it stays."""
    values = [getattr(point.split, part) for point in curve.points]
    return [value for n, value in enumerate(values) if n == 0 or values[n - 1] != value]


def last(curve: MemoryCurve) -> MemorySplit:
    return curve.points[-1].split


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        output = model(x)
        output.sum().backward()
        del output
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run
