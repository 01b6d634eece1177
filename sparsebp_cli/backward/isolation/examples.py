"""The positions of a batch's examples: one or several in a row, without padding.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
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
            raise NotAlone("an argument of the model belongs to several examples at once")
        return value


def find_examples(inputs: dict[str, Any], pad_token_id: int | None) -> Examples:
    """Find the examples of a batch from its arguments.

    Args:
        inputs: Arguments of the model's forward by name.
        pad_token_id: The token of padding. Without a mask, the function removes it at the ends of rows.

    Returns:
        The examples, with the arguments for running them alone.

    Raises:
        NotAlone: There is no tensor of tokens, or the boundaries of examples are unknown.
    """
    tokens = next(
        (v for k in ("input_ids", "inputs_embeds", "input") if isinstance(v := inputs.get(k), Tensor) and v.dim() > 1),
        None,
    )
    if tokens is None:
        tokens = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 1), None)
    if tokens is None:
        raise NotAlone("the model was called without a tensor of shape (examples, positions)")
    size = (tokens.shape[0], tokens.shape[1])
    segment_BT, told_by = _read_segments(inputs, size)
    real_BT = _read_real(inputs, size, segment_BT is not None, pad_token_id)
    found, several = [], False
    for row in range(size[0]):
        columns = real_BT[row].nonzero()[:, 0]
        if not len(columns):
            continue
        if segment_BT is None:
            found.append(Example(row, columns))
            continue
        own = segment_BT[row, columns]
        numbers = own.unique_consecutive()
        several |= len(numbers) > 1
        if len(numbers.unique()) < len(numbers):
            raise NotAlone("a row of the batch contains a sequence in several separate pieces")
        found += [Example(row, columns[own == number]) for number in numbers]
    if not several:
        told_by = "attention_mask" if "attention_mask" in inputs and inputs["attention_mask"] is not None else "rows"
    return Examples(inputs, size, tuple(found), told_by, several)


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


def _read_real(inputs: Mapping[str, Any], size: tuple[int, int], is_packed: bool, pad_token_id: int | None) -> Tensor:
    """Return which positions are not padding."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == size:
        return mask.cpu() != 0
    real_BT = torch.ones(size, dtype=torch.bool)
    ids = inputs.get("input_ids")
    if isinstance(mask, Tensor) or is_packed or pad_token_id is None or not isinstance(ids, Tensor):
        return real_BT
    if ids.shape != size:
        return real_BT
    # Padding is only at the ends of a row: within it, the pad token often marks the end of a text.
    is_token = ids.cpu() != pad_token_id
    after = is_token.flip(1).cummax(1).values.flip(1)  # whether a real token is here or later
    return is_token.cummax(1).values & after


def _read_segments(inputs: Mapping[str, Any], size: tuple[int, int]) -> tuple[Tensor | None, str]:
    """Return the sequence number of each position, and the name of the argument that contains it."""
    for name in LENGTHS:
        ends = inputs.get(name)
        if isinstance(ends, Tensor) and size[0] == 1:
            # One entry more than positions, since the last bound is the end of the row.
            begins = torch.zeros(size[1] + 1, dtype=torch.long)
            begins[ends.cpu().flatten()[1:].clamp(max=size[1])] = 1
            return begins[:-1].cumsum(0)[None], name
    if isinstance(numbers := inputs.get("seq_idx"), Tensor) and numbers.shape == size:
        return numbers.cpu(), "seq_idx"
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == size and not mask.is_floating_point() and int(mask.max()) > 1:
        return mask.cpu(), "attention_mask"
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape[-1] != size[1]:
        return None, ""
    real_BT = torch.ones(size, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == size:
        real_BT = mask.cpu() != 0
    return _read_restarts(positions.cpu(), real_BT)


def _read_restarts(positions: Tensor, real_BT: Tensor) -> tuple[Tensor | None, str]:
    """Return the same from restarting position numbers."""
    is_plain = positions.dim() < 3  # three numbers a position, of images: parts of an image may have equal ones
    position_BT = (positions if is_plain else positions[0]).expand(real_BT.shape)
    falls_BT = torch.zeros_like(real_BT)
    for row in range(len(real_BT)):
        columns = real_BT[row].nonzero()[:, 0]  # padding may have any number
        step = position_BT[row, columns].diff()
        falls_BT[row, columns[1:]] = step <= 0 if is_plain else step < 0
    back = position_BT[falls_BT]
    if len(back) == int(real_BT.sum()) - len(real_BT):
        return None, ""  # no numbers, such as all zeros
    if bool((back > 0).any()):
        raise NotAlone(f"position numbers restart at {int(back.max())}, not 0: sequences share the tokens before")
    return falls_BT.long().cumsum(1), "position_ids"
