"""Grouping of segments of packed rows: the segments of a group share one call of attention.

A call costs as much as thousands of pairs of a query and a key. Segments of equal size form one call. Segments of other
sizes join it, padded to the longest, if the additional pairs and copies cost less than another call. Padded queries
repeat the last query of their segment, and their output is dropped. No query attends to padded keys. The gradients of
both are zeros.

Shape letters: N computed rows, G segments of a group, L queries of a segment, A rows before it, K its keys, R rows of a
group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Cost of a call, in pairs of a query and a key, forward and backward, timed at widths 320 and 512 on two CPU cores.
# Calls on a GPU cost more.
CALL_COST = 10_000
COPY_COST = 4  # cost of copying a query or a key in a padded group, in the same unit


@dataclass(frozen=True)
class Padding:
    """The arrangement of segments of several sizes in one padded tensor."""

    row_S: Tensor  # row of each of the G * L queries, counted from the first row of the group
    place_R: Tensor  # the inverse: index of each row among the queries
    is_query_GL: Tensor  # on the host; False: padding
    is_key_GK: Tensor  # on the host; False: padding


@dataclass(frozen=True)
class SegmentGroup:
    """Segments whose attention is one call. Their rows are contiguous: segment by segment.

    Places and orders are on the host, where masks are made, so that no layer waits for the device.
    """

    start: int  # first row
    end: int  # the row after the last
    length: int  # L
    ancestor_GA: Tensor  # rows that precede each segment, in the order of their places
    query_GL: Tensor  # places of the queries, for masks and biases
    key_GK: Tensor  # places of the keys: A before the segment, then its own L
    attends: bool = True  # False: the rows attend to nothing, like padding
    has_one_parent: bool = False  # whether several segments follow the same rows
    padding: Padding | None = None  # None: all segments have L queries and K keys
    # Index of each query's own key, counted from the segment's first key. A causal query attends to no later key.
    order_GL: Tensor | None = None  # None: the last L keys
    is_uniform: bool = False  # whether places and numbers are the same in all segments, so that one mask is enough

    @property
    def num_segments(self) -> int:
        """G."""
        return len(self.query_GL)


def arrange(
    sizes: Mapping[int, tuple[int, int]], attends: Mapping[int, bool], kinds: Mapping[int, Hashable]
) -> list[list[int]]:
    """Return the numbers of the segments of each group, the largest segment first.

    ``sizes`` are each segment's numbers of queries and keys. Segments of equal sizes form a group. The function joins
    groups whose segments have the same ``kinds`` if that costs less.
    """
    # One mask over all rows would multiply every pair of rows of a batch, so call attention by group. See decision 33.
    equal: dict[tuple[int, int, bool], list[int]] = {}
    for number, (length, num_keys) in sizes.items():
        equal.setdefault((num_keys, length, attends[number]), []).append(number)
    by_kind: dict[tuple[bool, frozenset[Hashable]], list[list[int]]] = {}
    for (_, _, does), numbers in sorted(equal.items(), reverse=True):
        kind = (does, frozenset(kinds[number] for number in numbers))
        by_kind.setdefault(kind, []).append(numbers)
    return [group for (does, _), sets in by_kind.items() for group in (_join(sets, sizes) if does else sets)]


def _join(sets: list[list[int]], sizes: Mapping[int, tuple[int, int]]) -> list[list[int]]:
    """Return neighbouring sets of segments joined at the least total cost. Each input set has segments of one size."""
    costs, begins = [0], [0]  # for the first n sets: their least cost, and where their last group begins
    for end in range(1, len(sets) + 1):
        found = []
        num_segments = num_rows = length = num_keys = 0
        for begin in range(end - 1, -1, -1):
            queries, keys = sizes[sets[begin][0]]
            num_segments += len(sets[begin])
            num_rows += len(sets[begin]) * (queries + keys)
            length, num_keys = max(length, queries), max(num_keys, keys)
            copies = COPY_COST * num_rows if begin < end - 1 else 0
            found.append((costs[begin] + CALL_COST + num_segments * length * num_keys + copies, begin))
        cost, begin = min(found)
        costs.append(cost)
        begins.append(begin)
    groups = []
    end = len(sets)
    while end:
        groups.append([number for numbers in sets[begins[end] : end] for number in numbers])
        end = begins[end]
    return groups[::-1]


def make_group(
    start: int,
    queries: Sequence[Ints],
    keys: Sequence[Ints],
    place_N: Ints,
    device: torch.device,
    *,
    attends: bool,
    keys_apart: bool = False,
) -> SegmentGroup:
    """Return the group of segments with these rows.

    ``start`` is the number of its first query. The keys of a segment are the rows that precede it and its own rows.
    With ``keys_apart`` the group looks up all keys by index, and the queries may be any of the segment's own rows.
    """
    length, num_keys = max(map(len, queries)), max(map(len, keys))
    query_GL = np.stack([lengthen(rows, length) for rows in queries])
    key_GK = np.stack([lengthen(rows, num_keys) for rows in keys])
    ancestor_GA = key_GK if keys_apart else key_GK[:, : num_keys - length]
    is_padded = any(len(q) < length or len(k) < num_keys for q, k in zip(queries, keys, strict=True))
    # A segment's own rows are contiguous, and are its last keys.
    order_GL = np.stack([lengthen(q - k[-1] + len(k) - 1, length) for q, k in zip(queries, keys, strict=True)])
    is_last = not is_padded and bool((order_GL == np.arange(num_keys - length, num_keys)).all())
    place_GL, place_GK = place_N[query_GL], place_N[key_GK]
    return SegmentGroup(
        start,
        start + sum(map(len, queries)),
        length,
        to_tensor(ancestor_GA, device),
        torch.from_numpy(place_GL),
        torch.from_numpy(place_GK),
        attends,
        len(queries) > 1 and not keys_apart and bool((ancestor_GA == ancestor_GA[:1]).all()),
        _pad(queries, keys, length, num_keys, device) if is_padded else None,
        None if is_last else torch.from_numpy(order_GL),
        not is_padded and all(bool((part == part[:1]).all()) for part in (place_GL, place_GK, order_GL)),
    )


def _pad(queries: Sequence[Ints], keys: Sequence[Ints], length: int, num_keys: int, device: torch.device) -> Padding:
    num_queries, counts = np.array([*map(len, queries)]), np.array([*map(len, keys)])
    number_GL = np.minimum(np.arange(length), num_queries[:, None] - 1)
    first_G = num_queries.cumsum() - num_queries
    is_query_GL = np.arange(length) < num_queries[:, None]
    return Padding(
        to_tensor((first_G[:, None] + number_GL).reshape(-1), device),
        to_tensor(is_query_GL.reshape(-1).nonzero()[0], device),
        torch.from_numpy(is_query_GL),
        torch.from_numpy(np.arange(num_keys) < counts[:, None]),
    )


def lengthen(rows: Ints, length: int) -> Ints:
    """Return the rows with the last one repeated."""
    return np.concatenate((rows, np.repeat(rows[-1:], length - len(rows))))


def to_tensor(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    with torch.inference_mode(False):  # a training may use the layout of an evaluation
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)
