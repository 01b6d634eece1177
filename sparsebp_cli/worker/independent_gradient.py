"""Compare a step's gradient with those of other examples, for the policy and for dense at the same cost.

Fidelity compares the policy's gradient with the dense one *of the same batch*, where dense has cosine 1 by definition.
That does not show whether dense on a smaller batch would have been a better use of the cost. Here both are compared
with the dense gradient of many other training examples, an estimate of the gradient that training needs.

The policy's error is compared with the noise that stochastic gradient descent has anyway. If its squared error is small
against the variance of the dense gradient over micro-batches, it changes little. If it is several times that variance,
it needs as many times the batch (Z. Wang, J. Chen and J. Zhu, VCAS, ICLR 2024, https://arxiv.org/abs/2402.17227, keep
the ratio at 0.025). Two halves of the micro-batch estimate the variance.

Dense gets the part of the micro-batch that costs at least as much as the policy's step, in counted FLOPs of forward and
backward, so that timing noise has no influence. Its cosine is the mean over all disjoint parts of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sparsebp_cli.backward import GradientComparison
from sparsebp_cli.worker.batch import BatchOrder, num_targets
from sparsebp_cli.worker.trial_step import TrialStep

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class IndependentBatches:
    """A training micro-batch, and examples that it does not contain."""

    order: BatchOrder
    number: int  # of the micro-batch
    num_examples: int  # other examples requested; a small training set may have fewer
    loss: Callable[[Batch, int], Tensor]  # maps a batch and a number of targets to the summed loss over that number

    def others(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a forward for each batch of other examples."""
        batches = list(self.order.other_batches(self.number, self.num_examples))
        targets = max(1, sum(num_targets(batch) for batch in batches))
        for batch in batches:
            yield partial(self.loss, batch, targets)

    def parts(self, size: int) -> Iterator[tuple[Callable[[], Tensor], int]]:
        """Yield a forward and the number of targets of each disjoint part of ``size`` examples of the micro-batch."""
        batch = self.order[self.number]
        for part in range(len(batch["labels"]) // size):
            own = {name: tensor[part * size : (part + 1) * size] for name, tensor in batch.items()}
            targets = num_targets(own)
            yield partial(self.loss, own, max(1, targets)), targets


def measure_sgd_variance(trial: TrialStep, dense: Gradients, batches: IndependentBatches) -> float | None:
    """Return the variance of the dense gradient over micro-batches of this size, divided by its squared norm. Return
    None if there are not two halves with targets, or no gradient.

    With halves of n1 and n2 targets, E |g1 - g2|^2 is the variance of one target's gradient times (1/n1 + 1/n2). The
    variance of the micro-batch is the same variance over n1 + n2. Enter the trial step first. Costs one dense pass.
    """
    size = batches.order.batch_size // 2
    parts = [part for part in batches.parts(size) if part[1]][:2] if size else []
    if len(parts) < 2:
        return None
    halves = GradientComparison(dense, num_draws=2)
    for forward, _ in parts:
        with trial.on("dense") as backward:
            backward(forward())
            halves.add_draw(trial.result().gradients)
    spread = halves.overall().variance  # |g1 - g2|^2 / 2, over |g|^2
    (_, one), (_, other) = parts
    return None if spread is None else 2.0 * spread * one * other / (one + other) ** 2


class IndependentComparison:
    """Comparison of the policy's gradients (draw by draw) and of dense gradients of a smaller batch with the gradient
    of other examples. The trial step must be entered."""

    policy: GradientComparison

    def __init__(self, trial: TrialStep, batches: IndependentBatches) -> None:
        self._trial, self._batches = trial, batches
        self._large = self._run(*batches.others())
        self.policy, self._dense = GradientComparison(self._large), GradientComparison(self._large)

    def add_dense(self, cost_ratio: float) -> int:
        """Compare the dense gradients of parts that cost at least as much as the policy's step, and return the parts'
        size in examples. ``cost_ratio`` is the policy's cost over dense's on the whole micro-batch."""
        size = examples_at_cost(cost_ratio, self._batches.order.batch_size)
        for part, _ in self._batches.parts(size):
            self._dense.add_draw(self._run(part))
        return size

    @property
    def dense_cosine(self) -> float | None:
        """Mean cosine of the dense parts; None if a gradient is zero."""
        return self._dense.overall().cosine

    def _run(self, *forwards: Callable[[], Tensor]) -> Gradients:
        with self._trial.on("dense") as backward:
            for forward in forwards:
                backward(forward())
            return self._trial.result().gradients


def examples_at_cost(cost_ratio: float, batch_size: int) -> int:
    """Return the smallest number of examples, in [1, batch_size], for which dense costs at least as much as the
    policy's step. A policy that costs more than dense is compared with the whole micro-batch."""
    # A product that is a whole number of examples must not be rounded up to the next.
    return min(batch_size, max(1, math.ceil(cost_ratio * batch_size - 1e-9)))
