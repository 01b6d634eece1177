"""Quality on the held-out split."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sparsebp_cli.run import metric
from sparsebp_cli.worker.batch import num_targets


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[dict[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Measure a model without changing it.

    Args:
        model: In any mode; it is left in training mode.
        batches: The held-out split.
        device: Where the model is.

    Returns:
        ``eval/loss`` in nats a counted token (or example), and ``eval/accuracy`` for a classification.
    """
    model.eval()
    loss, correct, count, is_classification = 0.0, 0, 0, False
    for batch in batches:
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        outputs = model(**on_device)
        targets = num_targets(batch)
        loss += float(outputs.loss) * targets
        count += targets
        if batch["labels"].ndim == 1:
            is_classification = True
            correct += int((outputs.logits.argmax(-1) == on_device["labels"]).sum())
    model.train()
    values = {metric.EVAL_LOSS.name: loss / max(count, 1)}
    return values | ({metric.EVAL_ACCURACY.name: correct / max(count, 1)} if is_classification else {})
