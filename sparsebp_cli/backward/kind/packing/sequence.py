"""The beginnings of sequences in a row with several: from restarting position numbers, and bounds from trainers.

trl's ``packing`` and ``padding_free``, and the collators of transformers, pass the bounds of the sequences to kernels
that run without a mask. ``sdpa`` and ``eager`` attention do not read the bounds but the position numbers. So both must
agree; then they become part of the layout.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sparsebp_cli.backward.kind.packing.groups import Bools, Ints

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")  # starts of sequences in a flattened row
NUMBERS = "seq_idx"  # number of the sequence of each position
# All arguments about the bounds of sequences. The lengths follow from the bounds.
SEQUENCES = frozenset({*BOUNDS, NUMBERS, "max_length_q", "max_length_k"})


def find_begins(
    inputs: Mapping[str, Any], position_BT: Ints, holds_texts: Callable[[Mapping[str, Any]], bool]
) -> Bools | None:
    """Return where another sequence begins inside an example; None: nowhere.

    Like transformers: without a mask and a key/value cache, a sequence begins where position numbers restart.
    ``holds_texts`` returns whether this model separates them. If the batch has bounds, the script has declared that it
    contains sequences, even with a cache.
    """
    if inputs.get("attention_mask") is not None or inputs.get("position_ids") is None:
        return None
    begins: Bools = np.diff(position_BT, axis=1, prepend=position_BT[:, :1] - 1) != 1
    is_told = any(inputs.get(name) is not None for name in (*BOUNDS, NUMBERS))
    return begins if is_told or (begins.any() and holds_texts(inputs)) else None


def refuse_bounds(inputs: Mapping[str, Any], begins_BT: Bools | None, size: tuple[int, int], *, causal: bool) -> str:
    """Return why packing cannot use the batch's bounds, and a way out; empty if it can, or there are none.

    ``begins_BT`` are the beginnings by the position numbers; None: position numbers show none.
    """
    given = {name: value for name in (*BOUNDS, NUMBERS) if isinstance(value := inputs.get(name), Tensor)}
    if not given:
        return ""
    name = next(iter(given))
    if not causal:
        return f"{name} puts several sequences into a row of a bidirectional model: put each into a separate row"
    if begins_BT is None:
        return (
            f"{name} marks where sequences begin, but attention does not read it: pass position_ids that restart "
            "there, and no attention_mask"
        )
    for name, value in given.items():
        told_BT = _told_by(name, value, size)
        if told_BT is None or not np.array_equal(told_BT[:, 1:], begins_BT[:, 1:]):
            return f"{name} and position_ids begin sequences at different positions; attention follows position_ids"
    return ""


def _told_by(name: str, value: Tensor, size: tuple[int, int]) -> Bools | None:
    """Return where sequences begin according to an argument; None: it does not fit this batch."""
    numbers: Ints = value.detach().cpu().numpy()
    if name == NUMBERS:
        return None if numbers.shape != size else np.diff(numbers, axis=1, prepend=numbers[:, :1]) != 0
    begins = np.zeros(size, bool)
    bounds = numbers.reshape(-1)
    if size[0] != 1 or not len(bounds) or bounds.min() < 0 or bounds.max() != size[1]:
        return None
    begins[0, bounds[:-1]] = True
    return begins


def find_needed(read_BT: Bools, begins_BT: Bools | None) -> Bools:
    """Return the positions that are read, or precede one that is read in the same sequence."""
    starts = np.zeros(read_BT.shape, bool) if begins_BT is None else begins_BT.copy()
    starts[:, 0] = True
    number_N = starts.reshape(-1).cumsum() - 1
    place_N = np.arange(read_BT.size)
    last = np.full(number_N[-1] + 1, -1)
    is_read_N = read_BT.reshape(-1)
    np.maximum.at(last, number_N[is_read_N], place_N[is_read_N])
    needed: Bools = (place_N <= last[number_N]).reshape(read_BT.shape)
    return needed
