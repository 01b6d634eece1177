"""Time and FLOPs of what runs only to compute scores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from sparsebp_cli.backward.observe.flops import counting_now


@dataclass
class ScoringCost:
    """A context manager around scoring forwards. It synchronises with the device at both ends."""

    device: torch.device
    seconds: float = 0.0  # wall time, after the block
    flops: int = 0  # 0 unless FLOPs are being counted

    def __enter__(self) -> Self:
        """Start."""
        count = counting_now()
        if count is not None:
            count.is_scoring = True
        self._before = 0 if count is None else count.total
        self._start = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        count = counting_now()
        if count is not None:
            count.is_scoring = False
        self.seconds = self._now() - self._start
        self.flops = 0 if count is None else count.total - self._before

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
