"""The kind of policy that chooses, at the start of each epoch, the examples that it visits and the weight of each.

The row in the training split identifies an example. The worker stores the last training loss of each example, and
saves these losses in checkpoints.

Shape letters: N examples of the training split, K visited.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy.contract import Policy, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import GIVEN, Rule, not_beside, not_with, one_process

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Epoch:
    """The training examples and their last losses at the start of an epoch.

    Args:
        number: Number of the epoch, counted from 0.
        loss_N: Mean loss of each example's targets when it was last trained on, without its weight: nats, float32, on
            the CPU; NaN for an example that was never trained on.
        num_before: Visits of examples in all epochs before this one, at least 0.
        num_in_all: Visits of examples in the whole training, at least 1.
    """

    number: int
    loss_N: torch.Tensor
    num_before: int
    num_in_all: int

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(epoch)``."""
        return f"epoch {self.number}"


@dataclass(frozen=True)
class Visits:
    """The examples that an epoch visits, each once, in an order that the worker draws.

    Args:
        index_K: Rows in the training split, int64, ascending, each once, at least one.
        weight_K: Factor of each example's loss, float32, greater than 0.
    """

    index_K: torch.Tensor
    weight_K: torch.Tensor


class EpochSelector(Policy):
    """Chooses the examples that an epoch visits. A step's loss is the weighted sum of its examples' losses, divided by
    the number of the step's targets. The sum of the weights does not divide it.

    The recipe fixes the number of steps; an epoch of fewer examples has fewer steps. ``exact`` means that every epoch
    visits every example with the weight 1. ``unbiased`` means that the expected weight of each example over draws is 1,
    for all losses; an example that is left out has the weight 0.

    It keeps no state of its own: all that it knows of earlier epochs is ``loss_N``.
    """

    @abstractmethod
    def choose(self, epoch: Epoch, step: Step) -> Visits | None:
        """Choose the examples of an epoch.

        Args:
            epoch: Losses of the training examples so far. It must not be changed.
            step: The optimizer step in which the epoch starts; ``step.generator(epoch)`` is the only source of
                randomness allowed.

        Returns:
            The visits; None: all examples with the weight 1.
        """


EPOCH_SELECTOR = Kind(
    EpochSelector,
    asked="The policy decides at the start of each epoch, by the latest training loss of each example. Exact if "
    "every epoch visits every example once with the weight 1. Unbiased if each example's weight is 1 on average "
    "over random draws; a left-out example has the weight 0. [Choose the examples of an "
    "epoch](../guide/tokens.md#choose-the-examples-of-an-epoch)\n",
    suite="sparsebp_cli.testing.epoch:check_epoch_selector",
    by_worker=True,
    keeps_state=False,
    weighs_examples=True,
    limits=(
        Rule(
            "{policy} chooses the examples of an epoch, which works only in a recipe (sparsebp run)",
            why="`sparsebp run` numbers the examples, draws their order and stores their losses. It cannot see the "
            "data loader of your own loop or of a Trainer.",
            options={"loop": ("own", "trainer")},
        ),
        one_process("Each process would know the losses of its own examples only."),
        not_beside(
            ("TokenSelector", "ExampleSelector", "BatchPacker"),
            "The policy needs the loss of every example, from the logits of all its positions.",
            where="training",
        ),
        not_with("format", ("regression",), "it weights cross-entropy losses only"),
        not_with("segments", GIVEN, "it weights the losses of examples outside of the model"),
    ),
)
