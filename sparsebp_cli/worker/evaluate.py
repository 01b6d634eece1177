"""Compute loss and metrics on held-out splits: validation during training, the test split once, at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.recipe.evaluation import EVAL
from sparsebp_cli.recipe.evaluation import TEST as TEST_PREFIX
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.batch import num_targets, ordered_batches
from sparsebp_cli.worker.data import IGNORED, EncodedExample
from sparsebp_cli.worker.model import predicts_in_place
from sparsebp_cli.worker.process import Ranks

MOST_EXAMPLES = 10_000  # about 200 kB in the event log


@dataclass(frozen=True)
class HeldOutSplit:
    """A held-out split: its name in the event log, and the prefix of its metrics' names."""

    name: str
    prefix: str


VALIDATION, TEST = HeldOutSplit("validation", EVAL), HeldOutSplit("test", TEST_PREFIX)


@dataclass
class ExampleLosses:
    """The loss of each held-out example, so that two models can be compared example by example."""

    loss: list[float] = field(default_factory=list)  # mean over the example's targets, in nats, six significant digits
    targets: list[int] = field(default_factory=list)  # number of predictions that the loss counts

    def add(self, logits: Tensor, labels: Tensor, *, in_place: bool = False) -> None:
        """Add the losses of a batch, up to 10,000 examples in all. Logits are (B, T, V) with labels (B, T), -100 where
        ignored; or (B, classes) with labels (B,). Logits predict the next position's label, or with ``in_place`` their
        own position's."""
        for logits_of_one, labels_of_one in zip(logits, labels, strict=True):
            if len(self.loss) == MOST_EXAMPLES:
                return
            scores, wanted = logits_of_one[None], labels_of_one[None]
            if labels.ndim > 1 and in_place:
                scores, wanted = logits_of_one, labels_of_one
            elif labels.ndim > 1:
                scores, wanted = logits_of_one[:-1], labels_of_one[1:]
            count = int((wanted != IGNORED).sum())
            loss = nn.functional.cross_entropy(scores.float(), wanted, ignore_index=IGNORED, reduction="sum")
            self.loss.append(float(f"{float(loss) / max(count, 1):.6g}"))
            self.targets.append(count)

    def extend(self, other: ExampleLosses) -> None:
        """Append the losses of the following examples, computed by another rank, up to 10,000 in all."""
        room = MOST_EXAMPLES - len(self.loss)
        self.loss += other.loss[:room]
        self.targets += other.targets[:room]


def evaluation_batches(
    recipe: Recipe, examples: Sequence[EncodedExample], pad_token_id: int, num_ranks: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one evaluation, in the order of the examples. The last one may be short."""
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
    """Return a split's loss in nats per target, and the metrics of classes. ``examples`` collects the loss of every
    example on the first rank; None saves that work. The model is left in training mode."""
    model.eval()
    ranks, in_place = ranks or Ranks(), predicts_in_place(model)
    loss, count, classes_3C = 0.0, 0.0, torch.zeros(3, 0)
    found: list[ExampleLosses] = []  # by batch
    for batch in batches:
        own, counts = _share(batch, ranks)
        on_device = {name: tensor.to(device) for name, tensor in own.items()}
        outputs = model(**on_device)
        is_class = batch["labels"].ndim == 1
        if is_class and not classes_3C.numel():
            classes_3C = torch.zeros(3, outputs.logits.shape[-1], dtype=torch.float64)
        if not counts:
            found.append(ExampleLosses())
            continue
        targets = num_targets(own)
        # the mean over no targets is not a number
        loss += float(outputs.loss) * targets if targets else 0.0
        found.append(ExampleLosses())
        if examples is not None and getattr(outputs, "logits", None) is not None:
            found[-1].add(outputs.logits, on_device["labels"], in_place=in_place)
        count += targets
        if is_class:
            classes_3C += count_classes(outputs.logits.argmax(-1).cpu(), own["labels"], classes_3C.shape[1])
    model.train()
    if examples is not None:
        # Batch by batch, and rank by rank in each: this is the order of the examples.
        for part in itertools.chain(*zip(*ranks.gather(found), strict=True)):
            examples.extend(part)
    loss, count, *found_classes = ranks.all_sum([loss, count, *classes_3C.flatten().tolist()])
    values = {"loss": loss / max(count, 1)}
    if found_classes:
        classes_3C = torch.tensor(found_classes, dtype=torch.float64).view_as(classes_3C)
        values |= _judge_classes(classes_3C, count)
    return {f"{split.prefix}{name}": value for name, value in values.items()}


def _judge_classes(classes_3C: Tensor, count: float) -> dict[str, float]:
    values = {"accuracy": float(classes_3C[0].sum()) / max(count, 1)}
    values |= {"macro_f1": macro_f1(classes_3C), "mcc": matthews(classes_3C)}
    return values | ({"f1": float(find_f1(classes_3C)[1])} if classes_3C.shape[1] == 2 else {})


def count_classes(predicted_B: Tensor, labels_B: Tensor, num_classes: int) -> Tensor:
    """Return three counts for each class C, as (3, C): correctly predicted, predicted, and labelled examples."""
    kinds = (labels_B[predicted_B == labels_B], predicted_B, labels_B)
    return torch.stack([torch.bincount(kind, minlength=num_classes) for kind in kinds])


def macro_f1(classes_3C: Tensor) -> float:
    """Return the mean F1 of all classes that occur in labels or predictions, from the counts of ``count_classes``."""
    occurring_C = classes_3C[1] + classes_3C[2] > 0
    return float(find_f1(classes_3C)[occurring_C].mean()) if occurring_C.any() else 0.0


def find_f1(classes_3C: Tensor) -> Tensor:
    """Return the F1 of each class (C,), 0 for a class that does not occur."""
    right_C, predicted_C, labels_C = classes_3C
    f1_C: Tensor = 2 * right_C / (predicted_C + labels_C).clamp(min=1)
    return f1_C


def matthews(classes_3C: Tensor) -> float:
    """Return Matthews' correlation coefficient for any number of classes (J. Gorodkin, Comparing two K-category
    assignments by a K-category correlation coefficient, 2004). It is 0 if all labels or all predictions are equal."""
    right_C, predicted_C, labels_C = classes_3C.double()
    total = labels_C.sum()
    spreads = (total**2 - (predicted_C**2).sum()) * (total**2 - (labels_C**2).sum())
    shared = right_C.sum() * total - (predicted_C * labels_C).sum()
    return float(shared / spreads.sqrt()) if spreads > 0 else 0.0


def _share(batch: dict[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    """Return this rank's part of a batch, and whether it counts. If there are too few examples, a rank evaluates a
    duplicate that does not count, because every rank must call a sharded model equally often."""
    examples = len(batch["labels"])
    size = -(-examples // ranks.count)
    own = slice(ranks.rank * size, (ranks.rank + 1) * size)
    counts = own.start < examples
    return {name: tensor[own if counts else slice(1)] for name, tensor in batch.items()}, counts
