"""The layout of packed rows: which positions of a batch are computed, and to which rows each attends.

In a causal model, two positions have the same hidden states if their tokens, position numbers and places are the same,
up to and including the position. So the positions of a batch form a tree, and the model computes each node once. A
*segment* is a run of positions between two branches of that tree; without shared prefixes it is an example. One
attention call computes a *group* of segments.

Shape letters: B examples, T positions, N computed rows, G segments of a group, L rows of a segment, A rows before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparsebp_cli.backward.kind.packing.groups import Bools, Ints, SegmentGroup, arrange, make_group, to_tensor
from sparsebp_cli.backward.kind.packing.mixing import MixingPlan, Span, plan_mixing
from sparsebp_cli.backward.kind.packing.varlen import NO_ROWS, VarlenPlan, has_kernel, plan_calls
from sparsebp_cli.backward.patch.boundary import fill

# A branch adds an attention call in each layer. With fewer shared positions it costs more than it saves.
MIN_SHARED = 16

# Largest fraction of rows that are read at which a last layer runs twice, computing queries, keys and values again. By
# the multiplications of a llama's layer, 0.9 would break even.
MAX_READ = 0.8


@dataclass(frozen=True)
class Segment:
    """A run of positions of one example, which represents the same positions of all examples that share it."""

    example: int
    start: int  # index among the example's computed positions
    end: int
    parent: int | None = None  # number of the segment before it
    attends: bool = True


@dataclass(frozen=True)
class ReadRows:
    """The rows that the last layer runs because they are read.

    The groups count these rows. ``ancestor_GA`` has all rows to which a segment attends, including its own, as indices
    among the computed rows.
    """

    row_M: Tensor  # index among the computed rows
    number_N: Tensor  # the inverse; 0 for other rows
    groups: tuple[SegmentGroup, ...]
    calls: VarlenPlan | None = None  # None: attention runs group by group


@dataclass(frozen=True)
class HostRows:
    """The same as ``row_BT`` and ``computed_BT`` of a layout, on the host."""

    row_BT: Ints
    computed_BT: Bools


@dataclass(frozen=True)
class PackedLayout:
    """The rows of one packed forward and their positions. Tensors of indices are on the model's device."""

    shape: tuple[int, int]  # (B, T) of the caller's batch
    source_N: Tensor  # index of each row among the B * T positions
    position_N: Tensor  # position number of each row
    row_BT: Tensor  # row of each position; 0 where it is not computed
    computed_BT: Tensor  # whether a position has a row
    groups: tuple[SegmentGroup, ...]
    is_causal: bool  # whether rows are skipped or shared because positions attend only to earlier ones
    num_shared: int = 0  # positions that use the row of another example
    read: ReadRows | None = None  # None: the last layer runs all rows
    # Rows that another forward of the same update computed, and that precede segments of this forward, have the numbers
    # from N on: index of each among their stored outputs of the last layer; 0: it is not read. None: no such rows.
    before_A: Tensor | None = None
    _host: HostRows | None = None  # None: not made on the host
    calls: VarlenPlan | None = None  # None: attention runs group by group
    spans: tuple[Span, ...] = ()

    @cached_property
    def mixing(self) -> MixingPlan:
        """The rows in the order in which layers that mix neighbouring rows run them."""
        return plan_mixing(self.spans, self.source_N.device)

    @cached_property
    def host(self) -> HostRows:
        """Rows of all positions on the host; copied from the device if they were not made on the host."""
        return self._host or HostRows(self.row_BT.cpu().numpy(), self.computed_BT.cpu().numpy())

    def change(self, row_BT: Ints, computed_BT: Bools, num_shared: int) -> PackedLayout:
        """Return the layout with other rows of the positions."""
        row, computed = (to_tensor(values, self.row_BT.device) for values in (row_BT, computed_BT))
        host = HostRows(row_BT, computed_BT)
        return replace(self, row_BT=row, computed_BT=computed, num_shared=num_shared, _host=host)

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.source_N)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that attention multiplies."""
        return count_pairs(self.groups)

    @property
    def num_last_rows(self) -> int:
        """Rows of the last layer, if it runs only rows that are read."""
        return self.num_rows if self.read is None else len(self.read.row_M)

    @property
    def num_last_pairs(self) -> int:
        """Pairs of a query and a key in its attention."""
        return self.num_pairs if self.read is None else count_pairs(self.read.groups)

    def has_rows_of(self, other: PackedLayout) -> bool:
        """Return whether each row has the same position as in another layout."""
        return self.shape == other.shape and torch.equal(self.source_N, other.source_N)

    def take(self, hidden_1ND: Tensor, row_R: Tensor, before: Sequence[Tensor] = ()) -> Tensor:
        """Return rows (1, R, D) of the last layer's output, by their indices among the computed rows.

        ``before`` are the stored outputs (1, ..., D) of the rows before them.
        """
        is_short = self.read is not None and hidden_1ND.shape[1] != self.num_rows
        if self.before_A is not None:
            number_N = torch.arange(self.num_rows, device=row_R.device)
            if is_short and self.read is not None:
                number_N = self.read.number_N
            number_NA = torch.cat((number_N, hidden_1ND.shape[1] + self.before_A))
            return torch.cat((hidden_1ND, *before), 1)[:, number_NA.index_select(0, row_R)]
        if is_short and self.read is not None:
            row_R = self.read.number_N.index_select(0, row_R)
        return hidden_1ND[:, row_R]

    def spread(self, hidden_N: Tensor, what: str = "hidden states") -> Tensor:
        """Return rows (N, ...) as (B, T, ...), zero at positions without a row; ``what`` names them in errors."""
        spread_BT = hidden_N.index_select(0, self.row_BT.flatten()).view(*self.shape, *hidden_N.shape[1:])
        return fill(spread_BT, self.computed_BT, what)


def make_layout(  # noqa: PLR0913 - the facts of a batch
    needed_BT: Bools,
    token_BT: Ints | None,
    position_BT: Ints,
    device: torch.device,
    *,
    is_causal: bool,
    place_BT: Ints | None = None,
    alone_BT: Bools | None = None,
    begins_BT: Bools | None = None,
    read_BT: Bools | None = None,
    most_read: float = MAX_READ,
) -> PackedLayout:
    """Arrange the needed positions of a batch.

    ``place_BT`` are the places that windows and chunks of attention use, like columns in the plain step; None: the
    position numbers. ``token_BT`` are the token ids if examples share prefixes, else None. ``alone_BT`` marks positions
    that attend to nothing and to which nothing attends. ``begins_BT`` marks where another sequence begins inside an
    example. ``read_BT`` marks positions whose output is read; None: all. ``most_read`` is the largest fraction of rows
    that are read at which the last layer runs only these.
    """
    flat_BT = np.arange(needed_BT.size).reshape(needed_BT.shape)
    sources = [flat[row] for flat, row in zip(flat_BT, needed_BT, strict=True)]
    place_BT = position_BT if place_BT is None else place_BT
    if begins_BT is not None:
        number = begins_BT.reshape(-1).cumsum()
        sources = [part for s in sources for part in np.split(s, np.flatnonzero(np.diff(number[s])) + 1)]
    if token_BT is None:
        segments = [Segment(example, 0, len(source)) for example, source in enumerate(sources) if len(source)]
        shared = [(0, -1)] * len(sources)
    else:
        numbers = [values.reshape(-1) for values in (token_BT, position_BT, place_BT)]
        keys = [np.stack([values[s] for values in numbers], 1) for s in sources]
        segments, shared = branch(keys)
    for index in () if alone_BT is None else flat_BT[alone_BT]:
        segments.append(Segment(len(sources), 0, 1, attends=False))
        sources.append(np.array([index]))
        shared.append((0, -1))
    read = None if read_BT is None else (read_BT, most_read)
    return arrange_segments(segments, shared, sources, position_BT, place_BT, read, device, is_causal=is_causal)


def branch(keys: list[Ints]) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Return the segments of the tree of sequences, and for each example its number of shared positions and the last of
    their segments. Sorting by bytes makes the sequences with the longest common prefixes neighbours.
    """
    order = sorted(range(len(keys)), key=lambda example: keys[example].tobytes())
    cuts: dict[int, set[int]] = {example: {0, len(keys[example])} for example in order}
    prefix = [0]
    for before, example in pairwise(order):
        size = min(len(keys[before]), len(keys[example]))
        same = (keys[before][:size] == keys[example][:size]).all(1)
        length = size if same.all() else int(same.argmin())
        prefix.append(length if length >= MIN_SHARED else 0)
    # Split a sequence where a later one branches off, in the sequence that has those rows.
    path: list[tuple[int, int, int]] = []  # (example, begin, end) of the rows on the way to the current sequence
    holders = []
    for number, example in enumerate(order):
        path = [(holder, begin, min(end, prefix[number])) for holder, begin, end in path if begin < prefix[number]]
        if path:
            cuts[path[-1][0]].add(path[-1][2])
        holders.append((path[-1][0], path[-1][2]) if path else None)
        path.append((example, prefix[number], len(keys[example])))
    return _make_segments(order, holders, cuts)


def _make_segments(
    order: list[int], holders: list[tuple[int, int] | None], cuts: dict[int, set[int]]
) -> tuple[list[Segment], list[tuple[int, int]]]:
    segments: list[Segment] = []
    ending: dict[tuple[int, int], int] = {}  # the segment of an example that ends at a position
    shared = [(0, -1)] * len(order)
    for example, holder in zip(order, holders, strict=True):
        parent, start = None, 0
        if holder is not None:
            parent, start = ending[holder], holder[1]
            shared[example] = (start, parent)
        bounds = sorted(cut for cut in cuts[example] | {start} if cut >= start)
        for begin, end in pairwise(bounds):
            segments.append(Segment(example, begin, end, parent))
            parent = ending[example, end] = len(segments) - 1
    return segments, shared


def arrange_segments(  # noqa: PLR0913, PLR0915 - the facts of a batch, in one walk over its rows
    segments: list[Segment],
    shared: list[tuple[int, int]],
    sources: list[Ints],
    position_BT: Ints,
    place_BT: Ints,
    wanted: tuple[Bools, float] | None,
    device: torch.device,
    *,
    is_causal: bool,
    kept: Mapping[int, Ints] | None = None,
) -> PackedLayout:
    """Arrange the rows of segments. Each segment follows its parent.

    ``shared`` has for each example the number of positions with rows in other examples' segments, and the last of these
    segments. ``sources`` are the indices of the computed positions of each example. ``wanted`` marks the positions that
    are read, with the largest fraction of rows at which the last layer runs only these. ``kept`` maps segments that
    another forward computed to the indices of their rows among the stored outputs; None: no such segment.
    """
    size = position_BT.shape
    held = {} if kept is None else kept
    before = [_chain(segments, number) for number in range(len(segments))]
    own = [segment.end - segment.start for segment in segments]
    sizes = {number: (own[number], own[number] + sum(own[n] for n in chain)) for number, chain in enumerate(before)}
    attends = {number: segment.attends for number, segment in enumerate(segments)}
    # Segments of other lengths join a group only if they have the same keys before themselves.
    parents = {number: segment.parent for number, segment in enumerate(segments)}
    members = arrange({number: size for number, size in sizes.items() if number not in held}, attends, parents)
    rows: dict[int, Ints] = {}
    source_parts, start = [], 0
    for number in (number for numbers in members for number in numbers):
        segment = segments[number]
        rows[number] = np.arange(start, start + own[number])
        source_parts.append(sources[segment.example][segment.start : segment.end])
        start += own[number]
    num_rows = start
    for number in held:
        rows[number] = np.arange(start, start + own[number])
        source_parts.append(sources[segments[number].example][segments[number].start : segments[number].end])
        start += own[number]
    source_NA = np.concatenate(source_parts)
    source_N = source_NA[:num_rows]
    position_N, place_NA = position_BT.reshape(-1)[source_N], place_BT.reshape(-1)[source_NA]
    row, computed = np.zeros(size[0] * size[1], np.int64), np.zeros(size[0] * size[1], bool)
    for number, segment in enumerate(segments):
        row[sources[segment.example][segment.start : segment.end]] = rows[number]
    num_shared = 0
    for example, (length, last) in enumerate(shared):
        computed[sources[example]] = True
        if length:
            chain = np.concatenate([rows[n] for n in (*_chain(segments, last), last)])
            row[sources[example][:length]] = chain
            num_shared += length
    chains = {n: np.concatenate([rows[m] for m in (*before[n], n)]) for n in rows}
    groups = []
    for numbers in members:
        own_rows, keys = [rows[n] for n in numbers], [chains[n] for n in numbers]
        groups.append(make_group(int(own_rows[0][0]), own_rows, keys, place_NA, device, attends=attends[numbers[0]]))
    read = None
    if wanted is not None and is_causal:
        is_read = np.zeros(len(source_NA), bool)
        is_read[row[wanted[0].reshape(-1) & computed]] = True
        is_read = is_read[:num_rows]
        if kept is not None and not is_read.any():  # a layer needs one row; the others run only for keys and values
            is_read[0] = True
        if 0 < is_read.sum() <= wanted[1] * len(is_read) and not is_read.all():
            read = _find_read(rows, held, before, attends, is_read, place_NA, device)
    return PackedLayout(
        (size[0], size[1]),
        to_tensor(source_N, device),
        to_tensor(position_N, device),
        to_tensor(row.reshape(size), device),
        to_tensor(computed.reshape(size), device),
        tuple(groups),
        is_causal,
        num_shared,
        read,
        to_tensor(np.concatenate([*held.values()]), device) if held else None,
        HostRows(row.reshape(size), computed.reshape(size)),
        _plan_calls(members, rows, rows, before, attends, device),
        tuple(Span(rows[number], segment.parent, segment.attends) for number, segment in enumerate(segments)),
    )


def _plan_calls(
    members: list[list[int]],
    queries: dict[int, Ints],
    rows: dict[int, Ints],
    before: list[tuple[int, ...]],
    attends: dict[int, bool],
    device: torch.device,
) -> VarlenPlan | None:
    """Return the calls of variable-length attention for the segments of all groups; None without a kernel for them."""
    numbers = [number for group in members for number in group]
    if not has_kernel(device) or not all(attends[number] for number in numbers):
        return None
    chains = [np.concatenate([NO_ROWS, *(rows[m] for m in before[number])]) for number in numbers]
    return plan_calls([queries[n] for n in numbers], [rows[n] for n in numbers], chains, device)


def _find_read(
    rows: dict[int, Ints],
    held: Mapping[int, Ints],
    before: list[tuple[int, ...]],
    attends: dict[int, bool],
    is_read: Bools,
    place_N: Ints,
    device: torch.device,
) -> ReadRows:
    """Return the rows of the last layer. ``rows`` are those of each segment, ``held`` has the segments that another
    forward computed, and ``before`` the numbers of the segments before each.
    """
    queries = {n: own[is_read[own]] for n, own in rows.items() if n not in held and is_read[own].any()}
    chains = {n: np.concatenate([rows[m] for m in (*before[n], n)]) for n in queries}
    members = arrange({n: (len(own), len(chains[n])) for n, own in queries.items()}, attends, attends)
    groups, parts, start = [], [], 0
    for numbers in members:
        own, keys, does = [queries[n] for n in numbers], [chains[n] for n in numbers], attends[numbers[0]]
        groups.append(make_group(start, own, keys, place_N, device, attends=does, keys_apart=True))
        parts.extend(own)
        start = groups[-1].end
    row_M = np.concatenate(parts)
    number_N = np.zeros(len(is_read), np.int64)
    number_N[row_M] = np.arange(len(row_M))
    calls = _plan_calls(members, queries, rows, before, attends, device)
    return ReadRows(to_tensor(row_M, device), to_tensor(number_N, device), tuple(groups), calls)


def count_pairs(groups: tuple[SegmentGroup, ...]) -> int:
    """Return the pairs of a query and a key that attention multiplies."""
    return sum(group.query_GL.shape[1] * group.key_GK.numel() for group in groups)


def _chain(segments: list[Segment], number: int) -> tuple[int, ...]:
    chain: list[int] = []
    parent = segments[number].parent
    while parent is not None:
        chain.append(parent)
        parent = segments[parent].parent
    return tuple(reversed(chain))
