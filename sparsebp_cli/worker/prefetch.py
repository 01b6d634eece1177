"""Micro-batches of the coming step, collated, pinned and copied to a GPU while the step before still runs there.

A step is launched before it is computed, so the host has time until it reads the loss. No thread is needed for that,
and the order of everything stays as written. Batches follow from their numbers alone, so a checkpoint knows nothing of
those that are prepared: a resumed run prepares them again. The copies go through the stream of the computation: they
are a few hundred kilobytes, and a second stream would have to be waited for.
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
        """Begin with nothing prepared; ``num_batches`` is how many micro-batches the training has."""
        self._order, self._device, self._num_batches = order, device, num_batches
        self._prepared: dict[int, Prepared] = {}

    def take(self, numbers: Sequence[int]) -> list[Prepared]:
        """Return the micro-batches of a step, and forget what was prepared beside them."""
        prepared, self._prepared = self._prepared, {}
        return [prepared.get(number) or self._order.rank_part(number) for number in numbers]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Prepare the micro-batches of the coming step, after the losses of this one are known. Where a policy chooses
        the examples of each epoch nothing is prepared: a checkpoint holds the epoch that was begun last."""
        if self._device.type != "cuda" or self._order.follows_policy:
            return
        for number in filter(range(self._num_batches).__contains__, numbers):
            batch, targets = self._order.rank_part(number)
            self._prepared[number] = CopiedBatch(batch, self._device), targets

    def forget(self) -> None:
        """Drop what is prepared, because batches have other columns from now on."""
        self._prepared = {}
