"""Where sequences begin in a row that holds several: position numbers that restart, and what trainers send beside them.

trl's ``packing`` and ``padding_free``, and the collators of transformers, send the bounds of the sequences to kernels
that run without a mask. Attention by ``sdpa`` and ``eager`` does not read them: it goes by the position numbers. So the
two must say the same, and then they are a fact of the layout.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sparsebp_cli.backward.kind.packing.groups import Bools, Ints

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")  # where sequences begin in a flattened row
NUMBERS = "seq_idx"  # number of the sequence of each position
# The arguments that say where sequences begin; the lengths follow from the bounds.
SEQUENCES = frozenset({*BOUNDS, NUMBERS, "max_length_q", "max_length_k"})


def find_begins(
    inputs: Mapping[str, Any], position_BT: Ints, holds_texts: Callable[[Mapping[str, Any]], bool]
) -> Bools | None:
    """Return where another sequence begins inside of an example; None: nowhere.

    As transformers does: without a mask and a key/value cache, an example holds several sequences where the given
    position numbers restart; ``holds_texts`` says whether this model does so. Where bounds are given, the script has
    said that it does, whatever a cache does.
    """
    if inputs.get("attention_mask") is not None or inputs.get("position_ids") is None:
        return None
    begins: Bools = np.diff(position_BT, axis=1, prepend=position_BT[:, :1] - 1) != 1
    is_told = any(inputs.get(name) is not None for name in (*BOUNDS, NUMBERS))
    return begins if is_told or (begins.any() and holds_texts(inputs)) else None


def refuse_bounds(inputs: Mapping[str, Any], begins_BT: Bools | None, size: tuple[int, int], *, causal: bool) -> str:
    """Return why the given bounds cannot be taken, and a way out; empty if they can, or none are given.

    ``begins_BT`` is what the position numbers say, None: that they say nothing.
    """
    given = {name: value for name in (*BOUNDS, NUMBERS) if isinstance(value := inputs.get(name), Tensor)}
    if not given:
        return ""
    name = next(iter(given))
    if not causal:
        return f"{name} puts several sequences into a row of a model that looks ahead: give each a row of its own"
    if begins_BT is None:
        return (
            f"{name} says where sequences begin, and attention does not read it: give position_ids that restart there, "
            "and no attention_mask"
        )
    for name, value in given.items():
        told_BT = _told_by(name, value, size)
        if told_BT is None or not np.array_equal(told_BT[:, 1:], begins_BT[:, 1:]):
            return f"{name} and position_ids disagree on where sequences begin: attention goes by position_ids"
    return ""


def _told_by(name: str, value: Tensor, size: tuple[int, int]) -> Bools | None:
    """Return where sequences begin by an argument; None: it is of another batch."""
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
    """Return the positions that stand before one that is read, or are read, in the same sequence."""
    starts = np.zeros(read_BT.shape, bool) if begins_BT is None else begins_BT.copy()
    starts[:, 0] = True
    number_N = starts.reshape(-1).cumsum() - 1
    place_N = np.arange(read_BT.size)
    last = np.full(number_N[-1] + 1, -1)
    is_read_N = read_BT.reshape(-1)
    np.maximum.at(last, number_N[is_read_N], place_N[is_read_N])
    needed: Bools = (place_N <= last[number_N]).reshape(read_BT.shape)
    return needed
