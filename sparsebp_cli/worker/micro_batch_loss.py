"""The contribution of one micro-batch to the loss of a step, in which every token has the same weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebp_cli.worker.batch import num_targets


def micro_batch_loss(
    model: nn.Module, batch: dict[str, Tensor], targets: int, device: torch.device, candidates: str | None = None
) -> Tensor:
    """Run the model on a batch, and return its summed loss over the ``targets`` of the whole step on all ranks, so that
    the losses of all micro-batches add up to the mean. ``batch`` is on the host, where counting its targets does not
    wait for the device. ``candidates`` names the column that marks trainable targets, if any."""
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    if batch["labels"].ndim == 1:
        loss: Tensor = model(**on_device).loss
        return loss * (num_targets(batch) / targets) if targets != num_targets(batch) else loss
    items: float = targets
    if candidates is not None:
        # The engine multiplies this number by trained / targets of the batch: make that trained / candidates.
        items *= num_targets(batch) / max(1, num_targets(batch, candidates))
    mean: Tensor = model(**on_device, num_items_in_batch=torch.tensor(items, device=device)).loss
    return mean
