"""Orders of training data that put similar examples into one micro-batch, and what grouping by prefix would gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sparsebp_cli.backward.kind.packing.layout import MIN_SHARED, make_layout
from sparsebp_cli.worker.data import Example

GroupBy = Literal["length", "prefix"]
Order = NDArray[np.int64]

# Examples that are sorted by length together, in micro-batches: as in transformers' LengthGroupedSampler, so that an
# epoch does not go from long to short.
SORTED_BATCHES = 50
COUNTED_BATCHES = 20
LEAST_GAIN = 0.05  # of the rows: a smaller gain is not told


def group_order(
    examples: Sequence[Example], order: Order, group_by: GroupBy, batch_size: int, generator: torch.Generator
) -> Order:
    """Return a random order of an epoch, rearranged so that neighbours are similar.

    ``length``: within 50 micro-batches, the examples of each are of similar length; the micro-batches stay in random
    order. ``prefix``: examples that begin with the same 16 tokens are neighbours, in random order as the groups are.
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


def describe_prefix_gain(examples: Sequence[Example], batch_size: int, seed: int) -> str | None:
    """Return what grouping by prefix would leave of the rows that a causal model computes in packed batches; None if
    that is not worth a line. Counted on random and grouped orders of some examples, without a model."""
    generator = torch.Generator().manual_seed(seed)
    order: Order = torch.randperm(len(examples), generator=generator).numpy().copy()
    grouped = group_order(examples, order, "prefix", batch_size, generator)
    plain, fewer = (
        _count_rows(examples, some[: COUNTED_BATCHES * batch_size], batch_size) for some in (order, grouped)
    )
    if fewer > plain * (1.0 - LEAST_GAIN):
        return None
    return (
        f"training.group_by: prefix would put examples with the same beginning into one batch, and compute {fewer:.0f} "
        f"rows an example instead of {plain:.0f}; it changes the order of the data"
    )


def _count_rows(examples: Sequence[Example], order: Order, batch_size: int) -> float:
    """Return the rows of packed batches with shared prefixes, an example."""
    rows = 0
    for start in range(0, len(order), batch_size):
        chosen = [examples[number].input_ids for number in order[start : start + batch_size]]
        longest = max(map(len, chosen))
        real_BT = np.arange(longest) < np.array([len(ids) for ids in chosen])[:, None]
        ids_BT = np.stack([np.pad(ids, (0, longest - len(ids))) for ids in chosen])
        position_BT = np.broadcast_to(np.arange(longest), ids_BT.shape)
        rows += make_layout(real_BT, ids_BT, position_BT, torch.device("cpu"), is_causal=True).num_rows
    return rows / len(order)
