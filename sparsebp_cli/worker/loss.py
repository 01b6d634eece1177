"""What a micro-batch adds to the loss of its step, in which every token weighs alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsebp_cli.worker.batch import num_targets


def part_of_mean(
    model: nn.Module, batch: dict[str, Tensor], targets: int, device: torch.device, candidates: str | None = None
) -> Tensor:
    """Run the model on a batch, and return its part of the mean over all targets of the step, on all ranks.

    Args:
        model: That is trained.
        batch: On the host, where its targets are counted without waiting for the device.
        targets: Of the whole step; only candidates counted.
        device: The model's.
        candidates: Name of the batch's column that says which targets may be trained; None: all of them may.

    Returns:
        A loss to be differentiated: those of all micro-batches are added up.
    """
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    if batch["labels"].ndim == 1:
        loss: Tensor = model(**on_device).loss
        return loss * (num_targets(batch) / targets) if targets != num_targets(batch) else loss
    items: float = targets
    if candidates is not None:
        # The engine multiplies with the share of this batch's targets that is trained: leave that of candidates.
        items *= num_targets(batch) / max(1, num_targets(batch, candidates))
    mean: Tensor = model(**on_device, num_items_in_batch=torch.tensor(items, device=device)).loss
    return mean
