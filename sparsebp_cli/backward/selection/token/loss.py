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
    """Refuse a model with a loss of its own.

    Args:
        model: A causal language model.

    Raises:
        UnsupportedError: Its loss is not transformers' for causal language models.
    """
    function = cast("Any", model).loss_function
    known = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
    if function is not known:
        name = getattr(function, "__name__", repr(function))
        raise UnsupportedError(f"token selection computes transformers' ForCausalLMLoss, the model has {name}")


def scale(num_items: Any, marks: PositionMask) -> Any:
    """Return what the sum of the trained losses is divided by, so that each trained token weighs as in a mean over all.

    Args:
        num_items: ``num_items_in_batch``: targets of all micro-batches of a step; None: the mean of this batch.
        marks: Of this batch.

    Returns:
        The same number, times the share of this batch's targets that is trained; None for the mean.
    """
    num_targets, num_trained = int(marks.target.sum()), int(marks.trained.sum())
    if num_items is None or num_trained in (0, num_targets):
        return num_items
    return num_items * (num_trained / num_targets)


def row_loss(model: nn.Module, logits: Tensor, label_N: Tensor, num_items: Any) -> Tensor:
    """Return the loss of some rows.

    Args:
        model: Whose loss it is.
        logits: (1, N, V).
        label_N: What each row predicts.
        num_items: From :func:`scale`.

    Returns:
        One number.
    """
    function = cast("Any", model).loss_function
    labels = label_N[None]
    loss = function(logits, labels, logits.shape[-1], num_items_in_batch=num_items, shift_labels=labels)
    return cast("Tensor", loss)


def masked_labels(labels_BT: Tensor, marks: PositionMask) -> Tensor:
    """Return labels that train the chosen positions alone: the reference form of the loss.

    Args:
        labels_BT: As the model takes them.
        marks: What is trained.

    Returns:
        (B, T).
    """
    trains_BT = torch.zeros_like(marks.trained)
    trains_BT[:, 1:] = marks.trained[:, :-1]
    return labels_BT.masked_fill(~trains_BT.to(labels_BT.device), IGNORED)


def spread_logits(logits_NV: Tensor, marks: PositionMask) -> Tensor:
    """Return logits of all positions for a loss of the user's own: rows that were not computed are 0, without gradient.

    Args:
        logits_NV: Of the trained rows.
        marks: Which they are.

    Returns:
        (B, T, V).
    """
    size = logits_NV.shape[-1]
    index = marks.trained.flatten().nonzero().flatten().to(logits_NV.device)
    all_rows = logits_NV.new_zeros(marks.trained.numel(), size).index_copy(0, index, logits_NV)
    return all_rows.view(*marks.trained.shape, size)


def with_changes(output: Any, **changes: Tensor | None) -> Any:
    """Return a model's output with other values; what is set as an attribute would not reach ``output[0]``.

    Args:
        output: Of transformers.
        **changes: By field; those that this kind of output does not have are left out.

    Returns:
        Another one.
    """
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return type(output)(**(values | {name: value for name, value in changes.items() if name in values}))
