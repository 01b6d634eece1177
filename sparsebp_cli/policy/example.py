"""The kind of policy that says which examples of a batch are backpropagated."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy.contract import Policy, Step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Examples:
    """Chosen examples.

    Args:
        index_K: Their numbers in the batch, ascending.
        weight_K: What each one's loss is multiplied with; None: 1.
    """

    index_K: torch.Tensor
    weight_K: torch.Tensor | None = None


class ExampleSelector(Policy):
    """Answers: which examples of a batch are backpropagated? Asked before the forward that training differentiates."""

    @property
    @abstractmethod
    def needs_loss(self) -> bool:
        """Whether ``choose`` reads the examples' losses; they cost a forward, which is counted."""

    @abstractmethod
    def choose(self, num_examples: int, loss_B: torch.Tensor | None, step: Step) -> Examples | None:
        """Choose examples.

        Args:
            num_examples: B.
            loss_B: The mean loss of each example's targets, nats, float32; None where it is not needed.
            step: When; ``step.generator(...)`` is the only source of randomness allowed.

        Returns:
            Those that are backpropagated; None: all of them.
        """
