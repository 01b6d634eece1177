"""The loss of each example of a batch, from the model's logits. Weights of examples multiply these losses.

Shape letters: B examples, T positions, V vocabulary or classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsebp_cli.errors import UnsupportedError

IGNORED = -100  # label of positions without a target
# Allowed relative difference between the model's loss and the loss of its logits. It covers orders of a sum, and logits
# that were rounded to 8 bits before the loss.
_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 2e-2


def check_logits(logits: Tensor | None, labels: Tensor) -> Tensor:
    """Return the logits, (B, T, V) or (B, V). Raise :class:`UnsupportedError` unless there is one row for each
    label."""
    if logits is None or logits.shape[:-1] != labels.shape:
        got = "no logits" if logits is None else f"logits of shape {list(logits.shape)}"
        raise UnsupportedError(
            f"examples cannot be weighted: labels have shape {list(labels.shape)}, but the model returns {got}"
        )
    return logits


def sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of each example's targets, (B,)."""
    if labels.ndim == 1:
        return functional.cross_entropy(logits.float(), labels, reduction="none")
    # Shift the labels, because shifting logits would copy them.
    next_BT = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    loss_N = functional.cross_entropy(
        logits.float().flatten(0, 1), next_BT.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return loss_N.view(next_BT.shape).sum(1)


def count_targets(labels: Tensor) -> Tensor:
    """Return each example's number of predictions with a label, (B,)."""
    return torch.ones_like(labels) if labels.ndim == 1 else (labels[:, 1:] != IGNORED).sum(1)


def compare_losses(given: float, own: float, dtype: torch.dtype) -> None:
    """Raise :class:`UnsupportedError` if the model's loss is not the cross-entropy of its logits, since a weighted
    cross-entropy could not replace it."""
    if abs(given - own) > _TOLERANCE.get(dtype, _COARSE) * max(abs(given), 1e-3):
        raise UnsupportedError(
            "examples cannot be weighted, because the model's loss is not the cross-entropy of its logits: the "
            f"loss is {given:.6g}, the cross-entropy {own:.6g}"
        )
