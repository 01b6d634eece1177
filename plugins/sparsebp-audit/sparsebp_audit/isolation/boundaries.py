"""Find the examples of a batch from the arguments that data collators give: padding, and bounds of packed sequences.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.isolation.examples import LENGTHS, Example, Examples, NotAlone


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
        raise NotAlone(f"position numbers restart at {int(back.max())}, not 0: sequences share a prefix")
    return falls_BT.long().cumsum(1), "position_ids"
