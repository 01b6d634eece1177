"""Order training data so that similar examples share a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sparsebp_cli.backward.kind.packing.layout import MIN_SHARED
from sparsebp_cli.worker.data import EncodedExample

GroupBy = Literal["length", "prefix"]
Order = NDArray[np.int64]

# Number of micro-batches whose examples are sorted by length together, as in transformers' LengthGroupedSampler, so
# that an epoch does not go from long to short.
SORTED_BATCHES = 50


def group_order(
    examples: Sequence[EncodedExample], order: Order, group_by: GroupBy, batch_size: int, generator: torch.Generator
) -> Order:
    """Return an epoch's random order, rearranged so that neighbours are similar.

    ``length``: within 50 micro-batches, the examples of each have similar lengths; the micro-batches stay in random
    order. ``prefix``: examples with the same first 16 tokens are neighbours; groups and members are in random order.
    """
    if group_by == "prefix":
        first: dict[bytes, int] = {}
        keys = [examples[number].input_ids[:MIN_SHARED].tobytes() for number in order]
        ranks = [first.setdefault(key, place) for place, key in enumerate(keys)]
        return order[np.argsort(np.array(ranks), kind="stable")]
    lengths = np.array([len(examples[number].input_ids) for number in order])
    step = batch_size * SORTED_BATCHES
    chunks = [start + np.argsort(-lengths[start : start + step], kind="stable") for start in range(0, len(order), step)]
    by_length = order[np.concatenate(chunks)]
    batches = [by_length[start : start + batch_size] for start in range(0, len(order), batch_size)]
    last = [batches.pop()] if len(batches[-1]) < batch_size else []
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return np.concatenate([*(batches[number] for number in shuffled), *last])
