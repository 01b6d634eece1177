"""The loss of trained positions alone, by the arithmetic of transformers.

Shape letters: B examples, T positions, N trained positions of all examples, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.selection.token.row_plan import IGNORED, PositionMask
from sparsebp_cli.errors import UnsupportedError


def check_loss(model: nn.Module) -> None:
    """Raise :class:`UnsupportedError` unless a model's loss is transformers' for causal language models."""
    function = cast("Any", model).loss_function
    known = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
    if function is not known:
        name = getattr(function, "__name__", repr(function))
        raise UnsupportedError(f"token selection computes transformers' ForCausalLMLoss, the model has {name}")


def scale(num_items: Any, marks: PositionMask) -> Any:
    """Return the divisor of the summed trained losses, so that each trained token has the weight it has in a mean
    over all.

    ``num_items`` is the number of targets in all micro-batches of a step, None for the mean of this batch; it is
    multiplied by the trained share of this batch's targets.
    """
    num_targets, num_trained = int(marks.target.sum()), int(marks.trained.sum())
    if num_items is None or num_trained in (0, num_targets):
        return num_items
    return num_items * (num_trained / num_targets)


def row_loss(model: nn.Module, logits: Tensor, label_N: Tensor, num_items: Any) -> Tensor:
    """Return the loss of some rows: logits (1, N, V), labels (N,), and a divisor from :func:`scale`."""
    function = cast("Any", model).loss_function
    labels = label_N[None]
    loss = function(logits, labels, logits.shape[-1], num_items_in_batch=num_items, shift_labels=labels)
    return cast("Tensor", loss)


def masked_labels(labels_BT: Tensor, marks: PositionMask) -> Tensor:
    """Return labels (B, T) that train only the chosen positions: the reference of the loss."""
    trains_BT = torch.zeros_like(marks.trained)
    trains_BT[:, 1:] = marks.trained[:, :-1]
    return labels_BT.masked_fill(~trains_BT.to(labels_BT.device), IGNORED)


def spread_logits(logits_NV: Tensor, marks: PositionMask) -> Tensor:
    """Return logits (B, T, V) for the user's own loss; rows that were not computed are 0 and have no gradient."""
    size = logits_NV.shape[-1]
    index = marks.trained.flatten().nonzero().flatten().to(logits_NV.device)
    all_rows = logits_NV.new_zeros(marks.trained.numel(), size).index_copy(0, index, logits_NV)
    return all_rows.view(*marks.trained.shape, size)


def with_changes(output: Any, **changes: Tensor | None) -> Any:
    """Return a copy of a transformers output with some fields replaced; fields that it does not have are ignored.

    Assigning attributes instead would not change ``output[0]``.
    """
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return type(output)(**(values | {name: value for name, value in changes.items() if name in values}))
