"""Build micro-batches as tensors, in a reproducible order.

The order is a pure function of seed and position, so a checkpoint stores one number and a resumed run reads the same
data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT
from sparsebp_cli.worker.data import IGNORED, EncodedExample
from sparsebp_cli.worker.gap import Gaps
from sparsebp_cli.worker.grouping import GroupBy, Order, group_order
from sparsebp_cli.worker.model import predicts_in_place

IN_PLACE = "decoder_attention_mask"  # a column of batches whose labels belong to their own positions
PAD_TO = 8  # padded lengths are multiples of this, so that kernels see few distinct shapes


class BatchOrder:
    """An endless sequence of micro-batches: a new permutation each epoch, and no example dropped between epochs."""

    examples: Sequence[EncodedExample]
    seed: int
    pad_token_id: int
    batch_size: int
    num_ranks: int
    columns: Collection[str]
    candidates: str | None

    def __init__(
        self,
        examples: Sequence[EncodedExample],
        batch_size: int,
        seed: int,
        pad_token_id: int,
        *,
        rank: tuple[int, int] = (0, 1),
        columns: Collection[str] = (),
        candidates: str | None = None,
        group_by: GroupBy | None = None,
    ) -> None:
        """Make the order of the micro-batches that all ranks process together. Each rank has ``batch_size`` examples of
        a micro-batch. ``rank`` is this rank's number and the number of ranks. ``columns`` names the data columns that a
        batch includes, and ``candidates`` the one that marks trainable targets. ``group_by`` is what the examples of a
        micro-batch have in common; None means a random order."""
        self.examples, self.seed, self.pad_token_id = examples, seed, pad_token_id
        self.batch_size, self.num_ranks, self.columns = batch_size * rank[1], rank[1], columns
        self.candidates, self.group_by = candidates, group_by
        self.gaps: Gaps | None = None  # for a masked language model
        self.sorted_batches = 1  # number of micro-batches in a step whose examples are sorted by tokens; 1: no sorting
        self._sorted: tuple[int, list[int]] = (-1, [])  # the last sorted step and its positions
        self._own = slice(rank[0] * batch_size, (rank[0] + 1) * batch_size)
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return the micro-batch of all ranks by its number, counted from 0 over the whole run."""
        positions = self._positions(number)
        examples = [self.examples[self._example(position)] for position in positions]
        if self.gaps is not None:  # the position determines the masked tokens
            visited = zip(examples, positions, strict=True)
            examples = [self.gaps.draw(example, self.seed, position) for example, position in visited]
        return collate(examples, self.pad_token_id, self.columns)

    def rank_part(self, number: int) -> tuple[dict[str, Tensor], int]:
        """Return this rank's examples of a micro-batch, padded as in the whole micro-batch, and the number of candidate
        targets in the whole micro-batch."""
        batch = self[number]
        return {name: tensor[self._own] for name, tensor in batch.items()}, num_targets(batch, self.candidates)

    def _positions(self, number: int) -> Sequence[int]:
        count = self.sorted_batches
        if count == 1:
            return range(number * self.batch_size, (number + 1) * self.batch_size)
        step, place = divmod(number, count)
        if self._sorted[0] != step:
            every = range(step * count * self.batch_size, (step + 1) * count * self.batch_size)
            # This makes examples with the same beginning neighbours, in the order of their prefix tree.
            self._sorted = step, sorted(every, key=lambda p: self.examples[self._example(p)].input_ids.tobytes())
        return self._sorted[1][place * self.batch_size : (place + 1) * self.batch_size]

    def sort_steps(self, num_batches: int) -> None:
        """Sort the examples of ``num_batches`` micro-batches, one optimizer step, by tokens; 1: no sorting."""
        self.sorted_batches, self._sorted = num_batches, (-1, [])

    def _example(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.examples))
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._draw(epoch)
        return int(self._permutation[offset])

    def _draw(self, epoch: int) -> Order:
        """Return the rows of the training split in the order in which an epoch visits them."""
        # Seeds are so far apart that no epoch of one seed has the order of another seed's.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        # Use a NumPy array, because the peak of a step would count a tensor. The first step after a resume redraws the
        # permutation, and would then show more memory than in an uninterrupted run.
        drawn: Order = torch.randperm(len(self.examples), generator=generator).numpy().copy()
        if self.group_by is not None:
            drawn = group_order(self.examples, drawn, self.group_by, self.batch_size, generator)
        return drawn


def ordered_batches(
    examples: Sequence[EncodedExample], batch_size: int, pad_token_id: int
) -> Iterator[dict[str, Tensor]]:
    """Yield all examples in their order, for evaluation. The last batch may be short."""
    for start in range(0, len(examples), batch_size):
        yield collate(examples[start : start + batch_size], pad_token_id)


def collate(examples: Sequence[EncodedExample], pad_token_id: int, columns: Collection[str] = ()) -> dict[str, Tensor]:
    """Return one padded batch. It has ``input_ids`` (B, T), ``labels`` (B, T) or (B,), ``attention_mask`` (B, T) if
    anything is padded, ``token_type_ids`` (B, T) for pairs, and the named columns (B, T), 0 where padded, or 1 for
    weights of the loss. Padding is on the right unless the examples say otherwise."""
    ids = [example.input_ids for example in examples]
    if examples[0].is_pair:
        return _collate_pairs(ids, [example.labels for example in examples], pad_token_id)
    longest = max(map(len, ids))
    is_padded = any(len(each) < longest for each in ids)
    length, left = _round_up(longest) if is_padded else longest, [example.pads_left for example in examples]
    fill = partial(_fill, length=length, left=left)
    if examples[0].labels.ndim:
        labels = fill([example.labels for example in examples], IGNORED)
    else:
        labels = torch.stack([torch.from_numpy(example.labels) for example in examples])
    batch = {"input_ids": fill(ids, pad_token_id), "labels": labels}
    if is_padded:
        batch["attention_mask"] = fill([np.ones_like(each) for each in ids], 0)
    types = [example.token_type_ids for example in examples]
    if any(each is not None for each in types):  # all 0 is the default of models
        batch["token_type_ids"] = fill(types, 0)
    for name in columns:
        if name == LOSS_WEIGHT:  # an example in which all weights are 1 has no such column
            batch[name] = fill([example.columns.get(name) for example in examples], 1)
        else:
            batch[name] = fill([example.columns[name] for example in examples], 0)
    return batch


def _collate_pairs(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], pad_token_id: int
) -> dict[str, Tensor]:
    """Return a batch for an encoder and a decoder, each padded on the right: ``input_ids`` and ``attention_mask`` (B,
    S), ``labels`` and ``decoder_attention_mask`` (B, T). The model shifts the labels itself."""
    found, names = {}, ("input_ids", "attention_mask", "labels", "decoder_attention_mask")
    for parts, value, name, mask in ((sources, pad_token_id, *names[:2]), (targets, IGNORED, *names[2:])):
        length, left = _round_up(max(map(len, parts))), [False] * len(parts)
        found[name] = _fill(parts, value, length, left)
        found[mask] = _fill([np.ones_like(part) for part in parts], 0, length, left)
    return found


def _round_up(length: int) -> int:
    return -(-length // PAD_TO) * PAD_TO


def _fill(parts: Sequence[np.ndarray | None], value: int, length: int, left: Sequence[bool]) -> Tensor:
    """Return rows with the parts, and ``value`` at other positions. ``left`` says which rows are padded on the left.
    None is a row without a part."""
    dtype = next((torch.from_numpy(part).dtype for part in parts if part is not None), torch.float32)
    filled = torch.full((len(parts), length), value, dtype=dtype)
    for row, part in enumerate(parts):
        if part is not None:
            filled[row, slice(length - len(part), length) if left[row] else slice(len(part))] = torch.from_numpy(part)
    return filled


def num_targets(batch: dict[str, Tensor], candidates: str | None = None) -> int:
    """Return how many predictions of a batch the loss counts: trained next tokens, or examples of a classification.
    With ``candidates``, count only tokens whose value in that column is not 0."""
    labels = batch["labels"]
    if labels.ndim == 1:
        return labels.numel()
    if IN_PLACE in batch:
        return int((labels != IGNORED).sum())
    target_BT = labels[:, 1:] != IGNORED
    return int((target_BT if candidates is None else target_BT & (batch[candidates][:, 1:] != 0)).sum())


class CopiedBatch(dict[str, Tensor]):
    """A batch on the host whose copy to a device has started."""

    copies: dict[str, Tensor]

    def __init__(self, batch: dict[str, Tensor], device: torch.device) -> None:
        """Start to copy the batch."""
        super().__init__(batch)
        self.copies = to_device(batch, device)


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch on a device. CUDA copies use pinned memory: with pageable memory the host waits for the GPU."""
    if isinstance(batch, CopiedBatch):
        return batch.copies
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def micro_batch_loss(
    model: nn.Module, batch: dict[str, Tensor], targets: int, device: torch.device, candidates: str | None = None
) -> Tensor:
    """Run the model on a batch, and return its summed loss divided by the ``targets`` of the whole step on all ranks.
    So the losses of all micro-batches add up to the mean. ``batch`` is on the host, where counting targets does not
    wait for the device. ``candidates`` names the column that marks trainable targets, if any."""
    on_device = to_device(batch, device)
    if batch["labels"].ndim == 1 or predicts_in_place(model):  # such a model returns the mean over the batch
        loss: Tensor = model(**on_device).loss
        share = num_targets(batch) / targets
        return loss * share if targets != num_targets(batch) else loss
    # Every target of the step has the same weight, whatever its micro-batch. See decision 5.
    items: float = targets
    if candidates is not None:
        # The engine multiplies this number by trained / targets of the batch: turn that into trained / candidates.
        items *= num_targets(batch) / max(1, num_targets(batch, candidates))
    # Use full, not tensor: a tensor made from a number is copied from pageable memory, and the host waits for it.
    summed: Tensor = model(**on_device, num_items_in_batch=torch.full((), items, device=device)).loss
    return summed
