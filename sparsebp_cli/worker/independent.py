"""How much a step's gradient has to do with that of other examples, for the policy and for dense at the same cost.

Fidelity holds the policy's gradient against the dense one *of the same batch*: dense has cosine 1 there by definition,
and it stays open whether the cost had been better spent on dense with a smaller batch. Here both are held against the
dense gradient of many other training examples, as an estimate of the gradient that training is after.

Dense gets the part of the micro-batch that costs at least what the policy's step costs, in FLOPs of forward and
backward as counted, so that times do not decide; its cosine is the mean over as many disjoint parts as there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sparsebp_cli.backward import GradientComparison
from sparsebp_cli.worker.batch import BatchOrder, num_targets
from sparsebp_cli.worker.rehearsal import Rehearsal

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class IndependentBatches:
    """The examples of one comparison: a micro-batch of training, and others that it does not hold.

    Args:
        order: Of the training.
        number: Of the micro-batch.
        num_examples: How many others are wanted; there may be fewer.
        loss: Runs the model on a batch, and divides the loss of its targets by a number.
    """

    order: BatchOrder
    number: int
    num_examples: int
    loss: Callable[[Batch, int], Tensor]

    def others(self) -> Iterator[Callable[[], Tensor]]:
        """Yield the loss of batches of other examples, each as a forward to be run."""
        batches = list(self.order.others(self.number, self.num_examples))
        targets = max(1, sum(num_targets(batch) for batch in batches))
        for batch in batches:
            yield partial(self.loss, batch, targets)

    def parts(self, size: int) -> Iterator[Callable[[], Tensor]]:
        """Yield the loss of disjoint parts of the micro-batch, each of so many examples, as forwards."""
        batch = self.order[self.number]
        for part in range(len(batch["labels"]) // size):
            own = {name: tensor[part * size : (part + 1) * size] for name, tensor in batch.items()}
            yield partial(self.loss, own, max(1, num_targets(own)))


class IndependentComparison:
    """Takes in the policy's gradients, draw by draw, and those of dense with the smaller batch.

    Args:
        rehearsal: Entered.
        batches: What is compared.
    """

    def __init__(self, rehearsal: Rehearsal, batches: IndependentBatches) -> None:
        self._rehearsal, self._batches = rehearsal, batches
        self._large = self._run(*batches.others())
        self.policy, self._dense = GradientComparison(self._large), GradientComparison(self._large)

    def add_dense(self, cost_ratio: float) -> int:
        """Compare dense with the part of the micro-batch that costs at least as much as the policy's step.

        Args:
            cost_ratio: Of the policy's step, over that of a dense one on the same batch.

        Returns:
            Examples of that part.
        """
        size = examples_at_cost(cost_ratio, self._batches.order.batch_size)
        for part in self._batches.parts(size):
            self._dense.add_draw(self._run(part))
        return size

    @property
    def dense_cosine(self) -> float | None:
        """Of dense at the same cost, the mean over its parts; None where a gradient is zero."""
        return self._dense.overall().cosine

    def _run(self, *forwards: Callable[[], Tensor]) -> Gradients:
        with self._rehearsal.on("dense") as backward:
            for forward in forwards:
                backward(forward())
            return self._rehearsal.outcome().gradients


def examples_at_cost(cost_ratio: float, batch_size: int) -> int:
    """Return the smallest number of a micro-batch's examples that costs dense at least as much as the policy's step.

    Args:
        cost_ratio: Of the policy's step, over that of a dense one on the whole micro-batch.
        batch_size: Examples of the whole.

    Returns:
        In [1, batch_size]: a policy that costs more than dense is held against the whole micro-batch.
    """
    return min(batch_size, max(1, math.ceil(cost_ratio * batch_size - 1e-9)))
