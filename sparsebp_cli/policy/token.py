"""The kind of policy that says which positions of a batch are trained, and which carry gradient.

Shape letters: B examples, T positions. Position t predicts the token at t + 1; what is said of a position here is said
of that prediction, so the last position of an example is never a target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsebp_cli.policy.contract import Policy, Step

if TYPE_CHECKING:
    import torch

Score = Literal["loss", "entropy", "reference_loss"]


@dataclass(frozen=True)
class Tokens:
    """What a token selector is shown of one batch.

    Args:
        input_ids_BT: Token ids.
        target_BT: Whether the labels train the position's prediction.
        real_BT: Whether the position is no padding.
        scores: What the policy needs, by name, each (B, T) in float32 and 0 where there is no target: ``loss`` in nats
            and ``entropy`` in nats of the model as it is at this step, ``reference_loss`` of the reference model.
        columns: Further columns of the batch, by name, each (B, T).
    """

    input_ids_BT: torch.Tensor
    target_BT: torch.Tensor
    real_BT: torch.Tensor
    scores: Mapping[Score, torch.Tensor] = field(default_factory=dict)
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenChoice:
    """What a token selector chose.

    Args:
        trained_BT: Positions whose loss counts; only targets are.
        carries_BT: Positions that carry gradient, at least the trained ones; only ``mode: detach`` heeds it.
    """

    trained_BT: torch.Tensor
    carries_BT: torch.Tensor


class TokenSelector(Policy):
    """Answers: which positions are trained, which carry gradient? Asked before the forward that training
    differentiates, with the scores of a forward without gradients where the policy needs them.

    The two options below are every token selector's; the engine carries them out.
    """

    mode: Literal["exact", "detach"] = Field(
        "exact",
        description="exact: the gradient of the masked loss, without the work that it does not need. detach: keys and "
        "values of positions that carry no gradient are constants in every layer; biased, and much faster.",
    )
    reference: str | None = Field(
        None, description="Model, by name or path, whose loss of each token is the score reference_loss."
    )

    @property
    @abstractmethod
    def needs(self) -> frozenset[Score]:
        """Scores that ``choose`` reads with these options; each costs a forward, which is counted."""

    @property
    def reads(self) -> frozenset[str]:
        """Columns of the data that ``choose`` reads with these options."""
        return frozenset()

    @property
    @abstractmethod
    def budget(self) -> float | None:
        """Share of the targets that is trained, in (0, 1]; None where the data says it."""

    @abstractmethod
    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        """Choose positions.

        Args:
            tokens: The batch. Must not be changed.
            step: When; ``step.generator(...)`` is the only source of randomness allowed.

        Returns:
            What is trained, and what carries gradient.
        """
