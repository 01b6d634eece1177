"""Quality on held-out splits: validation during training, and the test split once, after the last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric
from sparsebp_cli.worker.batch import in_order, num_targets
from sparsebp_cli.worker.data import IGNORED, Example
from sparsebp_cli.worker.process import Ranks

MOST_EXAMPLES = 10_000  # about 200 kB of journal


@dataclass(frozen=True)
class Split:
    """A held-out split.

    Args:
        name: In the journal's record of example losses.
        loss: What its loss is logged as.
        accuracy: What its accuracy is logged as.
    """

    name: str
    loss: Metric
    accuracy: Metric


VALIDATION = Split("validation", metric.EVAL_LOSS, metric.EVAL_ACCURACY)
TEST = Split("test", metric.TEST_LOSS, metric.TEST_ACCURACY)


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

    def extend(self, other: ExampleLosses) -> None:
        """Take in what another rank found, up to 10,000 examples in all.

        Args:
            other: Of the examples that follow.
        """
        room = MOST_EXAMPLES - len(self.loss)
        self.loss += other.loss[:room]
        self.targets += other.targets[:room]


def select_examples(recipe: Recipe, examples: Sequence[Example], num_ranks: int = 1) -> Sequence[Example]:
    """Return what an evaluation during training reads; only ``eval_batches`` makes that depend on the batch size.

    Args:
        recipe: Says how many, in its section ``measure``.
        examples: Of the validation split.
        num_ranks: Processes that share each batch.

    Returns:
        The first of them.
    """
    measure = recipe.measure
    if measure.eval_batches is None:
        return examples[: measure.eval_examples]
    return examples[: measure.eval_batches * recipe.training.per_device_train_batch_size * num_ranks]


def evaluation_batches(
    recipe: Recipe, examples: Sequence[Example], pad_token_id: int, num_ranks: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Return the batches that one evaluation runs on, in the order of the examples; the last one may be short.

    Args:
        recipe: Says how large they are.
        examples: All that are evaluated.
        pad_token_id: Fills short examples.
        num_ranks: Processes that share each batch.

    Returns:
        The batches.
    """
    size = recipe.measure.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    return in_order(examples, size * num_ranks, pad_token_id)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    examples: ExampleLosses | None = None,
    ranks: Ranks | None = None,
    split: Split = VALIDATION,
) -> dict[str, float]:
    """Measure a model without changing it.

    Args:
        model: In any mode; it is left in training mode.
        batches: What is evaluated.
        device: Where the model is.
        examples: Takes in the loss of every example, on the first rank; None saves that work.
        ranks: Who share each batch; None: this process is alone.
        split: Which the batches are of.

    Returns:
        The split's loss in nats a counted token (or example), and its accuracy for a classification.
    """
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
        for together in zip(*ranks.collect(found), strict=True):
            for part in together:
                examples.extend(part)
    loss, correct, count = ranks.total([loss, correct, count])
    values = {split.loss.name: loss / max(count, 1)}
    return values | ({split.accuracy.name: correct / max(count, 1)} if is_classification else {})


def _share(batch: dict[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    """Return this rank's part of a batch, and whether it counts: where there are too few examples, one stands in, so
    that every rank runs the model as often."""
    examples = len(batch["labels"])
    size = -(-examples // ranks.count)
    own = slice(ranks.rank * size, (ranks.rank + 1) * size)
    counts = own.start < examples
    return {name: tensor[own if counts else slice(1)] for name, tensor in batch.items()}, counts
