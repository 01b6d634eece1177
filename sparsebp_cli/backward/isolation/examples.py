"""The positions of a batch's examples: one or several in a row, without padding.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LENGTHS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens", "cu_seqlens_q")  # starts of sequences in a flattened row
# Arguments about the arrangement of examples in a batch, which an example alone does not get.
ARRANGEMENT = {*LENGTHS, "cu_seq_lens_k", "cu_seqlens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"}
ARRANGEMENT |= {"attention_mask", "position_ids", "cache_position", "num_items_in_batch", "logits_to_keep"}


class NotAlone(Exception):  # noqa: N818 - an answer, not an error of the user
    """The examples of a batch cannot be separated, or cannot run alone; the message says why."""


@dataclass(frozen=True)
class Example:
    """One example of a batch: columns of a row, ascending."""

    row: int
    columns: Tensor


@dataclass(frozen=True)
class Examples:
    """All examples of a batch."""

    inputs: dict[str, Any]  # the model's arguments by name
    size: tuple[int, int]  # B, T
    found: tuple[Example, ...]
    told_by: str
    several: bool  # whether a row has more than one example
    kept: frozenset[str] = frozenset()  # arguments about the arrangement that an example alone gets, too

    def alone(self, number: int) -> dict[str, Any]:
        """Return the arguments of the model for one example alone: no padding, and without ``kept`` neither a mask nor
        position numbers."""
        example, left_out = self.found[number], ARRANGEMENT - self.kept
        return {name: self._part(value, example) for name, value in self.inputs.items() if name not in left_out}

    def _part(self, value: Any, example: Example) -> Any:
        rows, width = self.size
        if not isinstance(value, Tensor):
            return value
        if value.shape[:2] == (rows, width):
            return value[example.row, example.columns.to(value.device)][None]
        if value.dim() and value.shape[0] == rows and not self.several:
            return value[example.row : example.row + 1]
        if self.several and value.dim() > 1:
            raise NotAlone("an argument of the model has no batch dimension, so it cannot be divided into examples")
        return value


def examples_at(inputs: dict[str, Any], real_BT: Tensor, begins_BT: Tensor | None) -> Examples:
    """Return the examples of a batch. Runs of single examples keep their position numbers and mask.

    ``real_BT`` marks positions that are not padding, ``begins_BT`` where another sequence begins in a row; None:
    nowhere.
    """
    size = (real_BT.shape[0], real_BT.shape[1])
    number_BT = torch.zeros(size) if begins_BT is None else begins_BT.cumsum(1)
    found = []
    for row in range(size[0]):
        columns = real_BT[row].nonzero()[:, 0]
        numbers = number_BT[row, columns]
        found += [Example(row, columns[numbers == number]) for number in numbers.unique_consecutive()]
    kept = frozenset({"position_ids", "attention_mask"}) & {n for n, v in inputs.items() if v is not None}
    inputs = inputs | {name: inputs[name].expand(size) for name in kept}  # one row may apply to all
    return Examples(inputs, size, tuple(found), "position_ids", len(found) > size[0], kept)
