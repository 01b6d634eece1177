"""Some positions of every example as the rows of one rectangle, and how tensors are cut down to them.

Shape letters: B examples, T positions, K rows of an example, D anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """Positions of every example, ascending. An example that has fewer than another is filled up by any others.

    Args:
        position_BK: The positions, on the device that computes.
        valid_BK: Whether a row was asked for; else it fills the rectangle, and nothing may look at it.
        start: Of rows that are the positions start to start + K of every example; None where they are not.
        shared: Whether all examples have the same positions.
        is_full: Whether all were asked for.
    """

    position_BK: Tensor
    valid_BK: Tensor
    start: int | None
    shared: bool
    is_full: bool

    @classmethod
    def of(cls, member_BT: Tensor, device: torch.device, *, valid_BT: Tensor | None = None) -> Self | None:
        """Return the rows of what is chosen.

        Args:
            member_BT: Which positions, on the CPU.
            device: Where the rows are needed.
            valid_BT: Which of them anybody may look at; None: all.

        Returns:
            The rows; None when nothing is chosen.
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
        """Return some of these rows as positions.

        Args:
            rows: As numbers of these rows.

        Returns:
            The same, in order.
        """
        start = None if self.start is None or rows.start is None else self.start + rows.start
        position_BK = self.position_BK.gather(1, rows.position_BK)
        return RowNumbers(position_BK, rows.valid_BK, start, self.shared and rows.shared, rows.is_full)

    def __len__(self) -> int:
        """Return K."""
        return self.position_BK.shape[1]

    def take(self, x: Tensor) -> Tensor:
        """Cut a tensor down to the rows.

        Args:
            x: (B, T, D), or (1, T, D) where all examples have the same.

        Returns:
            (B, K, D), or (1, K, D) where all examples still have the same.
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
