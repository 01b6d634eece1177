"""The loss of a micro-batch in which each example has its weight, and the loss of each example.

Shape letters: B examples, T positions, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.worker.batch import run_micro_batch
from sparsebp_cli.worker.data import IGNORED

# Allowed difference between the model's loss and that of its logits, as a share of it: orders of a sum, and logits that
# were rounded to 8 bits before the loss.
_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 2e-2


def weighted_loss(
    model: nn.Module, batch: dict[str, Tensor], targets: int, device: torch.device, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Run the model on a batch. Return the sum of its examples' losses, each times its weight, over the ``targets`` of
    the whole step, and the mean loss of each example without its weight, (B,), detached.

    With weights of 1 this is the model's own loss to the last bit; raise UnsupportedError if that is anything but the
    cross-entropy of its logits, which the weights could not replace."""
    labels = batch["labels"].to(device)
    if all(weight == 1.0 for weight in weights):
        loss, output = run_micro_batch(model, batch, targets, device)
        logits = _check(output, labels)
        with torch.no_grad():  # one example after the other, so that no second tensor of all logits is made
            parts = zip(logits.split(1), labels.split(1), strict=True)
            sum_B = torch.cat([_sum_losses(*part) for part in parts])
        _compare(float(loss.detach()), float(sum_B.sum()) / targets, logits.dtype)
    else:
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        sum_B = _sum_losses(_check(model(**inputs).logits, labels), labels)
        loss = (sum_B * torch.tensor(weights, dtype=sum_B.dtype, device=device)).sum() / targets
    return loss, sum_B.detach() / _count_targets(labels)


def _check(logits: Tensor | None, labels: Tensor) -> Tensor:
    if logits is None or logits.shape[:-1] != labels.shape:
        got = "none" if logits is None else f"logits of shape {list(logits.shape)}"
        raise UnsupportedError(f"examples cannot be weighed: {list(labels.shape)} labels, and the model returns {got}")
    return logits


def _sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of each example's targets."""
    if labels.ndim == 1:
        return functional.cross_entropy(logits.float(), labels, reduction="none")
    # Labels are moved instead of logits, which would be copied.
    next_BT = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    loss_N = functional.cross_entropy(
        logits.float().flatten(0, 1), next_BT.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return loss_N.view(next_BT.shape).sum(1)


def _count_targets(labels: Tensor) -> Tensor:
    if labels.ndim == 1:
        return torch.ones_like(labels)
    return (labels[:, 1:] != IGNORED).sum(1).clamp(min=1)


def _compare(given: float, own: float, dtype: torch.dtype) -> None:
    if abs(given - own) > _TOLERANCE.get(dtype, _COARSE) * max(abs(given), 1e-3):
        raise UnsupportedError(
            f"examples cannot be weighed: the model's loss is {given:.6g}, the cross-entropy of its logits {own:.6g}"
        )
