"""Loss and accuracy on held-out splits: validation during training, and the test split once after the last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric
from sparsebp_cli.worker.batch import num_targets, ordered_batches
from sparsebp_cli.worker.data import IGNORED, Example
from sparsebp_cli.worker.process import Ranks

MOST_EXAMPLES = 10_000  # about 200 kB of journal


@dataclass(frozen=True)
class HeldOutSplit:
    """A held-out split: its name in the journal and the metrics of its loss and accuracy."""

    name: str
    loss: Metric
    accuracy: Metric


VALIDATION = HeldOutSplit("validation", metric.EVAL_LOSS, metric.EVAL_ACCURACY)
TEST = HeldOutSplit("test", metric.TEST_LOSS, metric.TEST_ACCURACY)


@dataclass
class ExampleLosses:
    """The loss of each held-out example, so that two models can be compared example by example."""

    loss: list[float] = field(default_factory=list)  # mean over the example's targets, nats, six significant digits
    targets: list[int] = field(default_factory=list)  # predictions that the loss counts

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the losses of a batch, up to 10,000 examples in all. Logits are (B, T, V) with labels (B, T), -100 where
        ignored; or (B, classes) with labels (B,)."""
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

    def extend(self, other: ExampleLosses) -> None:
        """Append the losses of the examples that follow, computed by another rank, up to 10,000 in all."""
        room = MOST_EXAMPLES - len(self.loss)
        self.loss += other.loss[:room]
        self.targets += other.targets[:room]


def select_examples(recipe: Recipe, examples: Sequence[Example], num_ranks: int = 1) -> Sequence[Example]:
    """Return the first validation examples that an evaluation during training reads. The number depends on the batch
    size only if the recipe sets ``eval_batches``."""
    measure = recipe.measure
    if measure.eval_batches is None:
        return examples[: measure.eval_examples]
    return examples[: measure.eval_batches * recipe.training.per_device_train_batch_size * num_ranks]


def evaluation_batches(
    recipe: Recipe, examples: Sequence[Example], pad_token_id: int, num_ranks: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one evaluation, in the order of the examples; the last one may be short."""
    size = recipe.measure.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    return ordered_batches(examples, size * num_ranks, pad_token_id)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    examples: ExampleLosses | None = None,
    ranks: Ranks | None = None,
    split: HeldOutSplit = VALIDATION,
) -> dict[str, float]:
    """Return a split's loss in nats a target, and its accuracy for a classification. ``examples`` collects the loss of
    every example on the first rank; None saves that work. The model is left in training mode."""
    model.eval()
    ranks = ranks or Ranks()
    loss, correct, count, is_classification = 0.0, 0.0, 0.0, False
    found: list[ExampleLosses] = []  # by batch
    for batch in batches:
        own, counts = _share(batch, ranks)
        on_device = {name: tensor.to(device) for name, tensor in own.items()}
        outputs = model(**on_device)
        if not counts:
            found.append(ExampleLosses())
            continue
        targets = num_targets(own)
        loss += float(outputs.loss) * targets if targets else 0.0
        found.append(ExampleLosses())
        if examples is not None and getattr(outputs, "logits", None) is not None:
            found[-1].add(outputs.logits, on_device["labels"])
        count += targets
        if batch["labels"].ndim == 1:
            is_classification = True
            correct += int((outputs.logits.argmax(-1) == on_device["labels"]).sum())
    model.train()
    if examples is not None:
        for together in zip(*ranks.gather(found), strict=True):
            for part in together:
                examples.extend(part)
    loss, correct, count = ranks.all_sum([loss, correct, count])
    values = {split.loss.name: loss / max(count, 1)}
    return values | ({split.accuracy.name: correct / max(count, 1)} if is_classification else {})


def _share(batch: dict[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    """Return this rank's part of a batch and whether it counts. If there are too few examples, a rank evaluates a
    duplicate that does not count, because every rank must call a sharded model equally often."""
    examples = len(batch["labels"])
    size = -(-examples // ranks.count)
    own = slice(ranks.rank * size, (ranks.rank + 1) * size)
    counts = own.start < examples
    return {name: tensor[own if counts else slice(1)] for name, tensor in batch.items()}, counts
