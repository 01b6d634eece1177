"""Quality on the held-out split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.run import metric
from sparsebp_cli.worker.batch import num_targets
from sparsebp_cli.worker.data import IGNORED

MOST_EXAMPLES = 10_000  # about 200 kB of journal


@dataclass
class ExampleLosses:
    """The loss of each held-out example, so that two models can be compared example by example.

    Args:
        loss: Mean over the example's targets, nats; rounded to six digits.
        targets: Predictions that its loss counts.
    """

    loss: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take in a batch, up to 10,000 examples in all.

        Args:
            logits: (B, T, V) of next tokens, or (B, classes).
            labels: (B, T) with -100 where nothing counts, or (B,).
        """
        for logits_of_one, labels_of_one in zip(logits, labels, strict=True):
            if len(self.loss) == MOST_EXAMPLES:
                return
            scores, wanted = logits_of_one[None], labels_of_one[None]
            if labels.ndim > 1:
                scores, wanted = logits_of_one[:-1], labels_of_one[1:]
            count = int((wanted != IGNORED).sum())
            loss = nn.functional.cross_entropy(scores.float(), wanted, ignore_index=IGNORED, reduction="sum")
            self.loss.append(float(f"{float(loss) / max(count, 1):.6g}"))
            self.targets.append(count)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    examples: ExampleLosses | None = None,
) -> dict[str, float]:
    """Measure a model without changing it.

    Args:
        model: In any mode; it is left in training mode.
        batches: The held-out split.
        device: Where the model is.
        examples: Takes in the loss of every example; None saves that work.

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
        if examples is not None and getattr(outputs, "logits", None) is not None:
            examples.add(outputs.logits, on_device["labels"])
        count += targets
        if batch["labels"].ndim == 1:
            is_classification = True
            correct += int((outputs.logits.argmax(-1) == on_device["labels"]).sum())
    model.train()
    values = {metric.EVAL_LOSS.name: loss / max(count, 1)}
    return values | ({metric.EVAL_ACCURACY.name: correct / max(count, 1)} if is_classification else {})
