"""Which examples a micro-batch holds, and how they become tensors. A pure function of seed and position: nothing to
save but a number, and a resumed run sees the same data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsebp_cli.worker.data import IGNORED, Example

PAD_TO = 8  # lengths are padded to a multiple, so that kernels see few shapes


class BatchOrder:
    """An endless order of micro-batches: a new permutation every epoch, nothing dropped between epochs."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        pad_token_id: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        columns: Collection[str] = (),
        candidates: str | None = None,
    ) -> None:
        """Set the order.

        Args:
            examples: What is drawn from; at least one.
            batch_size: Examples a micro-batch has on each rank.
            seed: Of the permutations.
            pad_token_id: Fills short examples.
            rank: Which of the processes that train together this is.
            num_ranks: How many there are; together they see what one would with so many times the batch.
            columns: Names of the examples' columns that a batch brings.
            candidates: The one of them that says which targets count.
        """
        self.examples, self.seed, self.pad_token_id = examples, seed, pad_token_id
        self.batch_size, self.num_ranks, self.columns = batch_size * num_ranks, num_ranks, columns
        self.candidates = candidates
        self._own = slice(rank * batch_size, (rank + 1) * batch_size)
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return micro-batch ``number`` of all ranks, counted from 0 over the whole run."""
        positions = range(number * self.batch_size, (number + 1) * self.batch_size)
        examples = [self.examples[self._example(position)] for position in positions]
        return collate(examples, self.pad_token_id, self.columns)

    def share(self, number: int) -> tuple[dict[str, Tensor], int]:
        """Return this rank's part of a micro-batch, as long as the whole one, and how many targets the whole one has.

        Args:
            number: Counted from 0 over the whole run.

        Returns:
            The part, and :func:`num_targets` of the micro-batch of all ranks, only candidates counted.
        """
        batch = self[number]
        return {name: tensor[self._own] for name, tensor in batch.items()}, num_targets(batch, self.candidates)

    def others(self, number: int, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of examples that a micro-batch does not hold; the order of training stays as it is.

        Args:
            number: Of the micro-batch.
            count: Examples that are wanted in all; of a small training set there may be fewer, or none.

        Yields:
            dict[str, Tensor]: Batches as large as the micro-batch; the last one may be short.
        """
        held = {self._example(position) for position in range(number * self.batch_size, (number + 1) * self.batch_size)}
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        shuffled = torch.randperm(len(self.examples), generator=generator).tolist()
        drawn = [example for example in shuffled if example not in held][:count]
        for start in range(0, len(drawn), self.batch_size):
            chosen = [self.examples[example] for example in drawn[start : start + self.batch_size]]
            yield collate(chosen, self.pad_token_id, self.columns)

    def _example(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.examples))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            # Not a tensor: drawn anew after a resume, it would count as memory of the step that drew it.
            drawn = torch.randperm(len(self.examples), generator=generator).numpy().copy()
            self._epoch, self._permutation = epoch, drawn
        return int(self._permutation[offset])


def in_order(examples: Sequence[Example], batch_size: int, pad_token_id: int) -> Iterator[dict[str, Tensor]]:
    """Yield all examples in their order, for evaluation; the last batch may be short."""
    for start in range(0, len(examples), batch_size):
        yield collate(examples[start : start + batch_size], pad_token_id)


def collate(examples: Sequence[Example], pad_token_id: int, columns: Collection[str] = ()) -> dict[str, Tensor]:
    """Put examples into one batch, padded on the right.

    Args:
        examples: At least one.
        pad_token_id: Fills short examples.
        columns: Names of the examples' columns that the batch brings.

    Returns:
        ``input_ids`` (B, T), ``labels`` (B, T) or (B,), ``attention_mask`` (B, T) where anything is padded, and the
        columns, (B, T), 0 where padded.
    """
    longest = max(len(example.input_ids) for example in examples)
    if all(len(example.input_ids) == longest for example in examples):
        ids_BT = torch.stack([torch.from_numpy(example.input_ids) for example in examples])
        labels = torch.stack([torch.from_numpy(e.labels) for e in examples])
        return {"input_ids": ids_BT, "labels": labels} | _columns(examples, columns, longest)
    length = -(-longest // PAD_TO) * PAD_TO
    ids_BT = torch.full((len(examples), length), pad_token_id)
    mask_BT = torch.zeros((len(examples), length), dtype=torch.int64)
    labels_BT = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        ids_BT[row, :count] = torch.from_numpy(example.input_ids)
        mask_BT[row, :count] = 1
        if example.labels.ndim:
            labels_BT[row, :count] = torch.from_numpy(example.labels)
    single = examples[0].labels.ndim == 0
    labels = torch.stack([torch.from_numpy(e.labels) for e in examples]) if single else labels_BT
    return {"input_ids": ids_BT, "labels": labels, "attention_mask": mask_BT} | _columns(examples, columns, length)


def _columns(examples: Sequence[Example], names: Collection[str], length: int) -> dict[str, Tensor]:
    found = {}
    for name in names:
        first = torch.from_numpy(examples[0].columns[name])
        found[name] = torch.zeros((len(examples), length), dtype=first.dtype)
        for row, example in enumerate(examples):
            column = torch.from_numpy(example.columns[name])
            found[name][row, : len(column)] = column
    return found


def num_targets(batch: dict[str, Tensor], candidates: str | None = None) -> int:
    """Return how many predictions of a batch the loss counts: trained next tokens, or examples of a classification.

    Args:
        batch: From :func:`collate`.
        candidates: Name of a column that leaves out the tokens where it is 0; None: none.

    Returns:
        The number.
    """
    labels = batch["labels"]
    if labels.ndim == 1:
        return labels.numel()
    target_BT = labels[:, 1:] != IGNORED
    return int((target_BT if candidates is None else target_BT & (batch[candidates][:, 1:] != 0)).sum())
