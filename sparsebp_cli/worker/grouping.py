"""Order training data so that similar examples share a micro-batch, and estimate what grouping by prefix would save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sparsebp_cli.backward.kind.packing.layout import MIN_SHARED, make_layout
from sparsebp_cli.worker.data import EncodedExample

GroupBy = Literal["length", "prefix"]
Order = NDArray[np.int64]

# Number of micro-batches whose examples are sorted by length together, as in transformers' LengthGroupedSampler, so
# that an epoch does not go from long to short.
SORTED_BATCHES = 50
COUNTED_BATCHES = 20
LEAST_GAIN = 0.05  # of the token positions; smaller gains are not reported


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


def describe_prefix_gain(examples: Sequence[EncodedExample], batch_size: int, seed: int) -> str | None:
    """Describe how many token positions a causal model would compute in packed batches with grouping by prefix. Return
    None if the gain is too small. The counts come from random and grouped orders of some examples, without a model."""
    generator = torch.Generator().manual_seed(seed)
    order: Order = torch.randperm(len(examples), generator=generator).numpy().copy()
    grouped = group_order(examples, order, "prefix", batch_size, generator)
    plain, fewer = (
        _count_rows(examples, some[: COUNTED_BATCHES * batch_size], batch_size) for some in (order, grouped)
    )
    if fewer > plain * (1.0 - LEAST_GAIN):
        return None
    return (
        "training.group_by: prefix would put examples with the same beginning into one batch, and compute "
        f"{fewer:.0f} token positions per example instead of {plain:.0f}; it changes the order of the data"
    )


def _count_rows(examples: Sequence[EncodedExample], order: Order, batch_size: int) -> float:
    """Return the token positions in packed batches with shared prefixes, per example."""
    rows = 0
    for start in range(0, len(order), batch_size):
        chosen = [examples[number].input_ids for number in order[start : start + batch_size]]
        longest = max(map(len, chosen))
        real_BT = np.arange(longest) < np.array([len(ids) for ids in chosen])[:, None]
        ids_BT = np.stack([np.pad(ids, (0, longest - len(ids))) for ids in chosen])
        position_BT = np.broadcast_to(np.arange(longest), ids_BT.shape)
        rows += make_layout(real_BT, ids_BT, position_BT, torch.device("cpu"), is_causal=True).num_rows
    return rows / len(order)
