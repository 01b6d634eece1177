"""The kind of policy that selects the examples of a batch that are backpropagated.

Shape letters: B examples, K kept.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.policy.contract import Policy, Step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Examples:
    """A batch as an example selector sees it.

    Args:
        number: B, at least 1.
        loss_B: The mean loss of each example's targets among the positions that were read, nats, float32, finite; of
            an example without any, the mean of the others. None if the policy does not need it.
    """

    number: int
    loss_B: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(examples, device)``."""
        return "examples"


class ExampleSelector(Policy):
    """Selects the examples of a batch that are backpropagated, before the forward that training differentiates. The
    engine runs that forward on the selected examples alone; its loss is the mean over their targets."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Share of a batch's examples that is selected at steps with a selection, in (0, 1]."""

    @abstractmethod
    def needs_loss(self, step: Step) -> bool:
        """Return whether ``choose`` reads the examples' losses at a step; they cost a forward, which is counted.

        Args:
            step: When.

        Returns:
            Whether it reads them.
        """

    @property
    @abstractmethod
    def needs_num_steps(self) -> bool:
        """Whether ``choose`` reads ``step.num_steps`` with these options."""

    @property
    def scored_share(self) -> float:
        """Share of the batch's positions, from the first, that the forward for the losses reads, in (0, 1]."""
        return 1.0

    @abstractmethod
    def choose(self, examples: Examples, step: Step) -> torch.Tensor | None:
        """Select examples.

        Args:
            examples: The batch. It must not be changed.
            step: When; ``step.generator(examples, device)`` is the only source of randomness allowed.

        Returns:
            Their numbers, int64, (K,), ascending, each once; None: all of them.
        """
