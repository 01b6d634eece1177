"""Some positions of every example as the rows of one rectangle, and the selection of these rows from tensors.

Shape letters: B examples, T positions, K rows of an example, D anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """Positions of every example, ascending; an example with fewer rows than another is padded with arbitrary
    positions.
    """

    position_BK: Tensor  # on the device that computes
    valid_BK: Tensor  # False for padding rows, which no row may attend to
    start: int | None  # if the rows are positions start to start + K of every example; else None
    shared: bool  # all examples have the same positions
    is_full: bool  # there are no padding rows

    @classmethod
    def of(cls, member_BT: Tensor, device: torch.device, *, valid_BT: Tensor | None = None) -> Self | None:
        """Return the rows of the positions in ``member_BT``, a mask on the CPU; None if it is empty.

        ``valid_BT`` restricts which of them other rows may attend to; None: all.
        """
        count_B1 = member_BT.sum(1, keepdim=True)
        most = int(count_B1.max())
        if most == 0:
            return None
        columns = member_BT.any(0).nonzero().flatten()
        first, stop = int(columns[0]), int(columns[-1]) + 1
        start = first if stop - first == most else None
        if start is not None:
            position_BK = torch.arange(first, stop).expand(len(member_BT), -1)
        else:
            position_BK = (~member_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        is_valid_BT = member_BT if valid_BT is None else member_BT & valid_BT
        valid_BK = is_valid_BT.gather(1, position_BK)
        shared = start is not None or bool((position_BK == position_BK[:1]).all())
        return cls(position_BK.to(device), valid_BK.to(device), start, shared, bool(valid_BK.all()))

    def among(self, rows: Self) -> RowNumbers:
        """Return some of these rows, given as indices into them, as positions."""
        start = None if self.start is None or rows.start is None else self.start + rows.start
        position_BK = self.position_BK.gather(1, rows.position_BK)
        return RowNumbers(position_BK, rows.valid_BK, start, self.shared and rows.shared, rows.is_full)

    def __len__(self) -> int:
        """Return K."""
        return self.position_BK.shape[1]

    def take(self, x: Tensor) -> Tensor:
        """Select the rows of a tensor (B, T, D), or (1, T, D) if all examples share it.

        Returns (B, K, D), or (1, K, D) if all examples still share the result.
        """
        if self.start is not None:
            return x.narrow(1, self.start, len(self))
        if self.shared:
            return x.index_select(1, self.position_BK[0])
        num_examples, num_rows = self.position_BK.shape
        rest = x.shape[2:]
        if len(x) == 1:
            return x[0].index_select(0, self.position_BK.flatten()).view(num_examples, num_rows, *rest)
        offset_B1 = torch.arange(num_examples, device=x.device)[:, None] * x.shape[1]
        flat = x.reshape(-1, *rest).index_select(0, (self.position_BK + offset_B1).flatten())
        return flat.view(num_examples, num_rows, *rest)
