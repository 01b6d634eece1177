"""The kind of policy that says which positions of a batch are trained, and which carry gradient.

Shape letters: B examples, T positions. Position t predicts the token at t + 1; what is said of a position here is said
of that prediction, so the last position of an example is never a target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from sparsebp_cli.policy.contract import Policy, Step

if TYPE_CHECKING:
    import torch

Score = Literal["loss", "entropy", "reference_loss"]


@dataclass(frozen=True)
class Tokens:
    """What a token selector is shown of one batch.

    Args:
        input_ids_BT: Token ids; None where the model was given embeddings.
        target_BT: Whether the labels train the position's prediction.
        real_BT: Whether the position is no padding.
        scores: What the policy needs, by name, each (B, T) in float32 and 0 where there is no target: ``loss`` in nats
            and ``entropy`` in nats of the model as it is at this step, ``reference_loss`` of the reference model.
        columns: Further columns of the batch, by name, each (B, T), as they stand in the data: the entry at t speaks of
            the token at t, which the position t - 1 predicts.
    """

    input_ids_BT: torch.Tensor | None
    target_BT: torch.Tensor
    real_BT: torch.Tensor
    scores: Mapping[Score, torch.Tensor] = field(default_factory=dict)
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Where the decision is made, for ``step.generator(tokens, device)``."""
        return "tokens"


@dataclass(frozen=True)
class TokenChoice:
    """What a token selector chose.

    Args:
        trained_BT: Positions whose loss counts; only targets are.
        carries_BT: Positions that carry gradient, at least the trained ones, and no padding; only ``mode: detach``
            heeds it.
    """

    trained_BT: torch.Tensor
    carries_BT: torch.Tensor


class TokenSelector(Policy):
    """Answers: which positions are trained, which carry gradient? Asked before the forward that training
    differentiates, with the scores of a forward without gradients where the policy needs them.

    The three options below are every token selector's; the engine carries them out.
    """

    mode: Literal["exact", "detach"] = Field(
        "exact",
        description="exact: the gradient of the masked loss, without the work that it does not need. detach: keys and "
        "values of positions that carry no gradient are constants in every layer; biased, and much faster.",
    )
    reference: str | None = Field(
        None, description="Model, by name or path, whose loss of each token is the score reference_loss."
    )
    reference_scores: Literal["cached", "fly"] = Field(
        "cached",
        description="cached: the reference reads the training data once, and its scores stay on the disk; fly: it "
        "reads every batch when it is trained on.",
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
    def candidate_column(self) -> str | None:
        """The one of these columns that says which labels may be trained at all, 0 or 1 a token; None: all of them.

        With accumulation, and on several processes, each of these weighs alike.
        """
        return None

    @property
    @abstractmethod
    def budget(self) -> float | None:
        """Share of the targets that is trained once schedules have ended, in (0, 1]; None where the data says it."""

    @abstractmethod
    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        """Choose positions.

        Args:
            tokens: The batch. Must not be changed.
            step: When; ``step.generator(tokens, device)`` is the only source of randomness allowed.

        Returns:
            What is trained, and what carries gradient.
        """

    @model_validator(mode="after")
    def _has_reference(self) -> Self:
        if self.reference is not None and "reference_loss" not in self.needs:
            raise ValueError("reference is read by no score that these options use: leave it out")
        return self
