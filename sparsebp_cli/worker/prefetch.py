"""Collate, pin and copy the next step's micro-batches to a GPU while it still computes the current step.

A step is launched before it is computed, so the host has time until it reads the loss. This needs no thread, and the
order of everything stays as written. Batches depend only on their numbers, so checkpoints need not store prepared ones:
a resumed run prepares them again. The copies use the stream of the computation. They are a few hundred kilobytes, and a
second stream would need synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsebp_cli.worker.batch import BatchOrder, CopiedBatch

Prepared = tuple[dict[str, Tensor], int]  # this rank's examples, and the number of targets in the whole micro-batch


class BatchPrefetch:
    """The micro-batches of a training, in the order of its steps. Without CUDA none is prepared."""

    def __init__(self, order: BatchOrder, device: torch.device, num_batches: int) -> None:
        """Start with nothing prepared. ``num_batches`` is the number of micro-batches in the training."""
        self._order, self._device, self._num_batches = order, device, num_batches
        self._prepared: dict[int, Prepared] = {}

    def take(self, numbers: Sequence[int]) -> list[Prepared]:
        """Return the micro-batches of a step, and drop all prepared ones."""
        prepared, self._prepared = self._prepared, {}
        return [prepared.get(number) or self._order.rank_part(number) for number in numbers]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Prepare the next step's micro-batches."""
        if self._device.type != "cuda":
            return
        for number in filter(range(self._num_batches).__contains__, numbers):
            batch, targets = self._order.rank_part(number)
            self._prepared[number] = CopiedBatch(batch, self._device), targets
