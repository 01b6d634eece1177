"""The batch from which an example selector chooses, and what one with state may observe.

Shape letters: B examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sparsebp_cli.policy import Observed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """The batch from which an example selector chooses.

    Args:
        number: Number of examples in the batch, B, at least 1.
        loss_B: The mean loss of each example's targets among the positions that were read, nats, float32, finite. An
            example without targets has the mean of the others. None if the policy does not need it.
        gradient_norm_B: The 2-norm of the gradient of each example's summed loss with respect to its logits at the
            same positions, float32, at least 0. None unless the policy reads it.
        reference_loss_B: The same as ``loss_B`` with the reference model. None unless the policy is a
            :class:`~sparsebp_cli.policy.ReferenceReader` and needs losses.
    """

    number: int
    loss_B: Tensor | None = None
    gradient_norm_B: Tensor | None = None
    reference_loss_B: Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(examples, device)``."""
        return "examples"


@dataclass(frozen=True)
class ReadExamples(Observed):
    """The examples of a forward: the candidates of an example selector.

    Args:
        name: Number of the forward within the step, from "0".
        examples: The batch, with the scores that the policy has read.
    """

    is_gradient: ClassVar[bool] = False
    examples: Examples
