"""Define a training's epochs: in which order each visits the examples, and which ones if a policy chooses.

Without a policy every epoch is a permutation of all examples. With one, the policy decides the length of an epoch, so
its position is known only when the previous epoch ends. This module keeps the position and the last loss of every
example, and checkpoints save them.

Shape letters: N examples of the training split, K visited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Epoch, EpochSelector, Step, Visits, returned
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.grouping import GroupBy, Order, group_order

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class EpochShuffle:
    """The random order of each epoch, a pure function of the seed and the epoch's number."""

    examples: Sequence[EncodedExample]
    seed: int
    batch_size: int  # of a micro-batch of all ranks
    group_by: GroupBy | None = None  # what the examples of a micro-batch have in common

    def draw(self, epoch: int, visited_N: NDArray[np.bool_] | None = None) -> Order:
        """Return the rows that an epoch visits, in its order: the rows in ``visited_N``, or all."""
        # Seeds are so far apart that no epoch of one seed has the order of another seed's.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        # Use a NumPy array, because the memory trace would count a tensor. The first step after a resume redraws the
        # permutation, and would then show more memory than in an uninterrupted run.
        drawn: Order = torch.randperm(len(self.examples), generator=generator).numpy().copy()
        if visited_N is not None:
            drawn = drawn[visited_N[drawn]]
        if self.group_by is not None:
            drawn = group_order(self.examples, drawn, self.group_by, self.batch_size, generator)
        return drawn


@dataclass(frozen=True)
class _ChosenEpoch:
    number: int
    start: int  # position of its first example in the sequence of all visits
    order_K: Order  # rows of the training split
    weight_K: Weights  # weights of their losses, in the same order

    @property
    def end(self) -> int:
        return self.start + len(self.order_K)


class ChosenEpochs:
    """The sequence of all visits of a training whose epochs a policy chooses. Read its positions in ascending order;
    only positions of the current step may be read again."""

    def __init__(self, policy: EpochSelector, shuffle: EpochShuffle, *, num_steps: int, micro_batches: int) -> None:
        """Start before the first epoch. ``micro_batches`` is their number in an optimizer step."""
        self._policy, self._shuffle = policy, shuffle
        self._num_steps, self._micro_batches = num_steps, micro_batches
        self._in_step = shuffle.batch_size * micro_batches  # visits in an optimizer step
        self._loss_N = np.full(len(shuffle.examples), np.nan, dtype=np.float32)
        self._epochs: list[_ChosenEpoch] = []  # epochs with visits in the current step

    def visit(self, position: int) -> tuple[int, float]:
        """Return the row of the example at a position, and the weight of its loss. All earlier epochs must have been
        trained, except for visits in the same step."""
        while not self._epochs or position >= self._epochs[-1].end:
            self._begin_epoch()
        epoch = next(epoch for epoch in reversed(self._epochs) if position >= epoch.start)
        offset = position - epoch.start
        return int(epoch.order_K[offset]), float(epoch.weight_K[offset])

    def see(self, rows: Sequence[int], losses: Sequence[float]) -> None:
        """Record the unweighted training losses of a micro-batch's examples."""
        for row, loss in zip(rows, losses, strict=True):
            self._loss_N[row] = loss

    @property
    def current(self) -> tuple[int, float]:
        """Number of the newest epoch that has begun, and the fraction of the examples that it visits."""
        newest = self._epochs[-1]
        return newest.number, len(newest.order_K) / len(self._loss_N)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs after a step: the losses, and the newest epoch."""
        newest = self._epochs[-1]
        return {
            "loss_N": torch.from_numpy(self._loss_N.copy()),
            "order_K": torch.from_numpy(newest.order_K.copy()),
            "weight_K": torch.from_numpy(newest.weight_K.copy()),
            "epoch": newest.number,
            "start": newest.start,
            "in_step": self._in_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raise ValueError if it is of another training split, LookupError if it is incomplete."""
        loss_N, order_K, weight_K = (state[name].numpy().copy() for name in ("loss_N", "order_K", "weight_K"))
        epoch, start, in_step = (int(state[name]) for name in ("epoch", "start", "in_step"))
        if in_step != self._in_step:
            raise ValueError(f"its steps have {in_step} examples, and steps of the plan have {self._in_step}")
        if loss_N.shape != self._loss_N.shape:
            raise ValueError(
                f"it was written for {len(loss_N)} training examples, but the training split has {len(self._loss_N)}"
            )
        if order_K.shape != weight_K.shape or not ((order_K >= 0) & (order_K < len(loss_N))).all():
            raise ValueError("its epoch visits examples that the training split does not have")
        self._loss_N = loss_N
        self._epochs = [_ChosenEpoch(epoch, start, order_K, weight_K)]

    def _begin_epoch(self) -> None:
        start = self._epochs[-1].end if self._epochs else 0
        number = self._epochs[-1].number + 1 if self._epochs else 0
        step = self._step_at(start)
        loss_N = torch.from_numpy(self._loss_N.copy())
        visits = self._policy.at(step).choose(Epoch(number, loss_N, start, self._in_step * self._num_steps), step)
        weight_N: Weights = np.ones(len(loss_N), dtype=np.float32)
        if visits is not None:
            asked = f"{type(self._policy).__name__}.choose"
            returned.require_type(asked, visits, Visits, None)
            returned.check_weighted(f"{asked}: index_K", visits.index_K, visits.weight_K, len(loss_N))
            weight_N[:] = 0.0
            weight_N[visits.index_K.numpy()] = visits.weight_K.numpy()
        # Keep a dense epoch's order without the unvisited examples, so that keeping all is bit-identical to dense. See
        # decision 45.
        order_K = self._shuffle.draw(number, None if visits is None else weight_N > 0.0)
        if not len(order_K):
            raise UsageError(f"{type(self._policy).__name__} chose no example for epoch {number}; choose at least one")
        # Drop epochs that ended before the current step; a step may span several.
        self._epochs = [epoch for epoch in self._epochs if epoch.end > step.index * self._in_step]
        self._epochs.append(_ChosenEpoch(number, start, order_K, weight_N[order_K]))

    def _step_at(self, position: int) -> Step:
        index, micro_batch = divmod(position // self._shuffle.batch_size, self._micro_batches)
        return Step(index, micro_batch, seed=self._shuffle.seed, num_steps=self._num_steps)
