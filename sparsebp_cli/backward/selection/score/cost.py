"""Time and FLOPs of what is computed only to choose."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from sparsebp_cli.backward.observe.flops import counting_now


@dataclass
class ScoringCost:
    """A context manager around the forwards for scores.

    Args:
        device: Waited for at both ends, so that what runs there is counted here.
        seconds: Wall time, once the block has ended.
        flops: Counted FLOPs; 0 where nobody counts.
    """

    device: torch.device
    seconds: float = 0.0
    flops: int = 0

    def __enter__(self) -> Self:
        """Start."""
        count = counting_now()
        self._before = 0 if count is None else count.total
        self._start = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        count = counting_now()
        self.seconds = self._now() - self._start
        self.flops = 0 if count is None else count.total - self._before

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
