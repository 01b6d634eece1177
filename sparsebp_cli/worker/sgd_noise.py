"""Estimate the noise of stochastic gradient descent, with which a policy's error is compared.

If the policy's squared error is small against the variance of the dense gradient over micro-batches, it changes little.
If it is several times that variance, it needs as many times the batch (Z. Wang, J. Chen and J. Zhu, VCAS, ICLR 2024,
https://arxiv.org/abs/2402.17227, keep the ratio at 0.025). Two halves of the micro-batch estimate the variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from sparsebp_cli.backward import GradientComparison
from sparsebp_cli.worker.batch import num_targets
from sparsebp_cli.worker.trial_step import TrialStep

Batch = dict[str, Tensor]
Half = tuple[Callable[[], Tensor], int]  # a forward, and the number of targets of its examples


def halve(batch: Batch, loss: Callable[[Batch, int], Tensor]) -> list[Half]:
    """Return the two halves of a micro-batch, without its last example if the number is odd. ``loss`` maps a batch and
    a number of targets to the summed loss over that number. Return nothing unless both halves have targets."""
    size = len(batch["labels"]) // 2
    halves = [{name: part[begin : begin + size] for name, part in batch.items()} for begin in (0, size)]
    found: list[Half] = [(partial(loss, half, n), n) for half in halves if (n := num_targets(half))]
    return found if len(found) == 2 else []


def measure_sgd_variance(trial: TrialStep, dense: dict[str, Tensor | None], halves: Sequence[Half]) -> float | None:
    """Return the variance of the dense gradient over micro-batches of this size, divided by its squared norm. Return
    None without halves, or without a gradient.

    With halves of n1 and n2 targets, E |g1 - g2|^2 is the variance of one target's gradient times (1/n1 + 1/n2). The
    variance of the micro-batch is the same variance over n1 + n2. Enter the trial step first. Costs one dense pass.
    """
    if not halves:
        return None
    compared = GradientComparison(dense, num_draws=2)
    for forward, _ in halves:
        with trial.on("dense") as backward:
            backward(forward())
            compared.add_draw(trial.result().gradients)
    spread = compared.overall().variance  # |g1 - g2|^2 / 2, over |g|^2
    (_, one), (_, other) = halves
    return None if spread is None else 2.0 * spread * one * other / (one + other) ** 2
