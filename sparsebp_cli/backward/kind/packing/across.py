"""The rows of an encoder to which rows of a decoder attend.

Shape letters: B examples, M rows of the encoder, N of the decoder, G segments of a group, K keys of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebp_cli.backward.kind.packing.groups import Ints, lengthen, to_tensor
from sparsebp_cli.backward.kind.packing.layout import PackedLayout


@dataclass(frozen=True)
class GroupMemory:
    """The keys of one group of segments of the decoder."""

    row_GK: Tensor  # (1, K) if all segments attend to the same source
    is_key_GK: Tensor | None  # False: padding; None: no padding


@dataclass(frozen=True)
class PackedMemory:
    """The keys of each group of a decoder's rows."""

    groups: tuple[GroupMemory, ...]
    num_rows: int  # M

    @classmethod
    def of(cls, source: PackedLayout, target: PackedLayout) -> PackedMemory:
        """Return the encoder's keys for each group of a decoder's rows."""
        row_BS, computed_BS = source.host.row_BT, source.host.computed_BT
        example_N = target.source_N.cpu().numpy() // target.shape[1]
        groups = []
        for group in target.groups:
            firsts = group.start + np.arange(group.num_segments) * group.length
            if group.padding is not None:
                firsts = group.start + group.padding.row_S.cpu().numpy()[:: group.length]
            rows = [row_BS[number][computed_BS[number]] for number in example_N[firsts]]
            groups.append(_make(rows, source.row_BT.device))
        return cls(tuple(groups), source.num_rows)


def _make(rows: list[Ints], device: torch.device) -> GroupMemory:
    if all(np.array_equal(rows[0], others) for others in rows[1:]):
        return GroupMemory(to_tensor(rows[0][None], device), None)
    num_keys = max(map(len, rows))
    is_key = np.arange(num_keys) < np.array([*map(len, rows)])[:, None]
    row_GK = to_tensor(np.stack([lengthen(own, num_keys) for own in rows]), device)
    return GroupMemory(row_GK, None if is_key.all() else to_tensor(is_key, device))
