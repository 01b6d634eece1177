"""The order in which layers that mix neighbouring rows run the segments of a layout: parents before continuations.

Shape letters: N computed rows, S segments of a run, L rows of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebp_cli.backward.kind.packing.groups import Ints, lengthen, to_tensor

# Segments without continuations run together, padded at their ends. This is the least length of one, as a fraction of
# the longest.
MIN_LENGTH = 0.75


@dataclass(frozen=True)
class Span:
    """The rows of a segment."""

    row_L: Ints
    parent: int | None  # number of the span before it
    attends: bool  # False: padding


@dataclass(frozen=True)
class MixingRun:
    """Segments that run together.

    Args:
        row_SL: Their rows; a shorter segment repeats its last row.
        before: For each segment the run of its parent, and the parent's number in that run; empty: they begin a text.
        is_read: Whether other segments continue from their states.
        attends: False: the rows are padding, which these layers replace by zeros.
    """

    row_SL: Tensor
    before: tuple[tuple[int, int], ...]
    is_read: bool
    attends: bool


@dataclass(frozen=True)
class MixingPlan:
    """The runs of a layout, parents first, and the place of each row among the concatenated outputs of the runs."""

    runs: tuple[MixingRun, ...]
    place_N: Tensor


def plan_mixing(spans: Sequence[Span], device: torch.device) -> MixingPlan:
    """Arrange the segments of a layout into runs. A segment with continuations runs with others of its exact length,
    since padding would change its state."""
    own, num_rows = [len(span.row_L) for span in spans], sum(len(span.row_L) for span in spans)
    spans = _without_single_rows(spans)
    parents = {span.parent for span in spans}
    waiting, place = set(range(len(spans))), dict[int, tuple[int, int]]()
    members: list[list[int]] = []
    while waiting:
        ready = [n for n in waiting if spans[n].parent is None or spans[n].parent in place]
        waiting -= set(ready)
        ready.sort(key=lambda n: (*_kind_of(spans, parents, n), -len(spans[n].row_L), n))
        runs: list[list[int]] = []
        for number in ready:
            if not runs or not _fits(spans, parents, runs[-1][0], number):
                runs.append([])
            runs[-1].append(number)
        for run in runs:
            place |= {number: (len(members), index) for index, number in enumerate(run)}
            members.append(run)
    made, start = [], 0
    place_N = np.zeros(num_rows, np.int64)
    for run in members:
        rows = [spans[number].row_L for number in run]
        before = tuple(place[parent] for number in run if (parent := spans[number].parent) is not None)
        is_read = run[0] in parents
        length = len(rows[0])
        if before and not is_read:  # a single row after a state would run as a step of a generation
            length = max(2, length)
        for number, row in zip(run, rows, strict=True):
            begin = len(row) - own[number]
            place_N[row[begin:]] = start + np.arange(begin, len(row))
            start += length
        row_SL = to_tensor(np.stack([lengthen(row, length) for row in rows]), device)
        made.append(MixingRun(row_SL, before, is_read, spans[run[0]].attends))
    return MixingPlan(tuple(made), to_tensor(place_N, device))


def _without_single_rows(spans: Sequence[Span]) -> list[Span]:
    """Return the segments without single rows between two others. Layers would run such a row as a step of a
    generation, which has no gradient. So each continuation computes this row again, from the state before it."""
    found = dict[int, Span]()
    waiting = list(range(len(spans)))
    while waiting:
        number = waiting.pop(0)
        span = spans[number]
        if span.parent is not None and span.parent not in found:
            waiting.append(number)
            continue
        parent = None if span.parent is None else found[span.parent]
        if parent is not None and parent.parent is not None and len(parent.row_L) == 1:
            span = Span(np.concatenate((parent.row_L, span.row_L)), parent.parent, span.attends)
        found[number] = span
    return [found[number] for number in range(len(spans))]


def _fits(spans: Sequence[Span], parents: set[int | None], first: int, number: int) -> bool:
    """Return whether a segment can run together with another, which is at least as long."""
    if _kind_of(spans, parents, first) != _kind_of(spans, parents, number):
        return False
    length, own = len(spans[first].row_L), len(spans[number].row_L)
    return own == length if number in parents else own >= MIN_LENGTH * length


def _kind_of(spans: Sequence[Span], parents: set[int | None], number: int) -> tuple[bool, bool, bool]:
    return number in parents, spans[number].parent is None, spans[number].attends
