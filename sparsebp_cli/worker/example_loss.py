"""Compute the loss of a micro-batch with a weight for each example, and the loss of each example.

Shape letters: B examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.kind.example_loss import check_logits, compare_losses, count_targets, sum_losses
from sparsebp_cli.worker.batch import run_micro_batch


def weighted_loss(
    model: nn.Module, batch: dict[str, Tensor], targets: int, device: torch.device, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Run the model on a batch. Return the weighted sum of its examples' losses over the ``targets`` of the whole step,
    and the unweighted mean loss of each example, (B,), detached.

    If all weights are 1, this is the model's own loss, bit for bit. Raise UnsupportedError if the model's loss is not
    the cross-entropy of its logits, because weights could not replace it.
    """
    labels = batch["labels"].to(device)
    if all(weight == 1.0 for weight in weights):
        loss, output = run_micro_batch(model, batch, targets, device)
        logits = check_logits(getattr(output, "logits", None), labels)
        with torch.no_grad():  # one example at a time, so that no second tensor of all logits is created
            parts = zip(logits.split(1), labels.split(1), strict=True)
            sum_B = torch.cat([sum_losses(*part) for part in parts])
        compare_losses(float(loss.detach()), float(sum_B.sum()) / targets, logits.dtype)
    else:
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        sum_B = sum_losses(check_logits(model(**inputs).logits, labels), labels)
        loss = (sum_B * torch.tensor(weights, dtype=sum_B.dtype, device=device)).sum() / targets
    return loss, sum_B.detach() / count_targets(labels).clamp(min=1)
