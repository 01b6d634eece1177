"""Time and FLOPs of computing scores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from sparsebp_cli.backward.core.device_seconds import DeviceSeconds
from sparsebp_cli.backward.observe.flops import counting_now


@dataclass
class ScoringCost:
    """A context manager around scoring forwards. On a CUDA device it records events, which are read later."""

    device: torch.device
    seconds: float | DeviceSeconds = 0.0  # wall time, set at the end of the block
    flops: int = 0  # 0 unless the block runs under count_flops

    def __enter__(self) -> Self:
        """Start."""
        count = counting_now()
        self._before = 0 if count is None else count.total
        self._start = _mark(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        count = counting_now()
        start, stop = self._start, _mark(self.device)
        if isinstance(start, float) or isinstance(stop, float):
            assert isinstance(start, float) and isinstance(stop, float)  # noqa: PT018 - of one device
            self.seconds = stop - start
        else:
            self.seconds = DeviceSeconds(spans=((start, stop),))
        self.flops = 0 if count is None else count.total - self._before


def _mark(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
