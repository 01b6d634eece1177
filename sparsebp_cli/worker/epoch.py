"""Define a training's epochs: in which order each visits the examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.grouping import GroupBy, Order, group_order


@dataclass(frozen=True)
class EpochShuffle:
    """The random order of each epoch, a pure function of the seed and the epoch's number."""

    examples: Sequence[EncodedExample]
    seed: int
    batch_size: int  # of a micro-batch of all ranks
    group_by: GroupBy | None = None  # what the examples of a micro-batch have in common

    def draw(self, epoch: int) -> Order:
        """Return the rows of the training split in the order in which an epoch visits them."""
        # Seeds are so far apart that no epoch of one seed has the order of another seed's.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        # Use a NumPy array, because the peak of a step would count a tensor. The first step after a resume redraws the
        # permutation, and would then show more memory than in an uninterrupted run.
        drawn: Order = torch.randperm(len(self.examples), generator=generator).numpy().copy()
        if self.group_by is not None:
            drawn = group_order(self.examples, drawn, self.group_by, self.batch_size, generator)
        return drawn
