"""The kind of policy that selects which positions of a batch are trained, and which carry gradient.

Shape letters: B examples, T positions. Position t predicts the token at t + 1. A property of a position refers to this
prediction, so the last position of an example is never a target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from sparsebp_cli.policy.contract import Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.reference import ReferenceReader
from sparsebp_cli.policy.rule import GIVEN, Rule, at_linears, not_with

if TYPE_CHECKING:
    import torch

Score = Literal["loss", "entropy", "gradient_norm", "reference_loss"]
TokenMode = Literal["exact", "detach"]


@dataclass(frozen=True)
class Tokens:
    """The batch from which a token selector chooses, with the scores in the policy's ``needs``.

    Args:
        input_ids_BT: Token ids; None if the model receives embeddings.
        target_BT: Whether the labels train the position's prediction.
        real_BT: Whether the position is not padding.
        scores: Scores by name, each (B, T) in float32, and 0 outside of targets. ``loss`` and ``entropy``: of the model
            at this step, in nats. ``gradient_norm``: the 2-norm of the loss' gradient with respect to the position's
            logits. ``reference_loss``: the loss of the reference model, in nats.
        columns: Further columns of the batch, by name, each (B, T), as in the data: the entry at t refers to the token
            at t, which the position t - 1 predicts.
    """

    input_ids_BT: torch.Tensor | None
    target_BT: torch.Tensor
    real_BT: torch.Tensor
    scores: Mapping[Score, torch.Tensor] = field(default_factory=dict)
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the decision, for ``step.generator(tokens, device)``."""
        return "tokens"


@dataclass(frozen=True)
class TokenChoice:
    """The decision of a token selector.

    Args:
        trained_BT: Positions whose loss counts; only targets.
        carries_BT: Positions that carry gradient: at least the trained ones, and no padding. Only the mode
            ``detach`` uses it.
    """

    trained_BT: torch.Tensor
    carries_BT: torch.Tensor


class TokenSelector(ReferenceReader):
    """Selects which positions are trained and which carry gradient, before the forward that training differentiates.
    If ``needs`` names scores, the engine computes them by a forward without gradients. The engine implements
    ``mode`` and the options of a reference for all token selectors."""

    mode: TokenMode = Field(
        "exact",
        description="exact: compute the gradient of the masked loss and skip work that it does not need. detach: "
        "treat the keys and values of the other positions as constants; biased, and much faster.",
    )

    @property
    @abstractmethod
    def needs(self) -> frozenset[Score]:
        """Scores that ``choose`` reads with these options. The engine counts the FLOPs of computing them."""

    @property
    def reads_reference(self) -> bool:
        """Whether ``needs`` names the loss of a reference."""
        return "reference_loss" in self.needs

    @property
    def reads(self) -> frozenset[str]:
        """Columns of the data that ``choose`` reads with these options."""
        return frozenset()

    @property
    def candidate_column(self) -> str | None:
        """The column among ``reads`` that marks trainable labels, 0 or 1 a token; None: all labels are trainable.

        All trainable targets have the same weight, even with gradient accumulation or several processes.
        """
        return None

    @property
    @abstractmethod
    def budget(self) -> float | None:
        """Fraction of the targets that is trained after the warm-up, in (0, 1]; None if it depends on the data."""

    @abstractmethod
    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        """Select positions.

        Args:
            tokens: The batch. It must not be changed.
            step: The step of the decision; ``step.generator(tokens, device)`` is the only source of randomness allowed.

        Returns:
            The positions that are trained, and the positions that carry gradient.
        """


def _find_facts(policy: TokenSelector) -> Mapping[str, object]:
    return {
        "mode": policy.mode,
        "columns": policy.reads,
        "candidate_column": policy.candidate_column,
        "fits_head": False,
    }


TOKEN_SELECTOR = Kind(
    TokenSelector,
    asked="The policy scores tokens before each training forward; the step's cost includes this. Exact if all targets "
    "are trained and no gradient is skipped. Unbiased if targets are drawn from the whole batch and no gradient is "
    "skipped. [Train only some tokens or examples](../guide/tokens.md)\n",
    # With a batch packer, it must choose among the labels before the packer runs, so its chooser wraps the packer.
    extensions=(
        (100, "sparsebp_cli.backward.kind.token.extension:make_extension"),
        (550, "sparsebp_cli.backward.kind.token.extension:make_chooser"),
    ),
    suite="sparsebp_cli.testing.token:check_token_selector",
    at_sites=True,
    shortens=True,
    chooses_targets=True,
    facts=_find_facts,
    limits=(
        Rule(
            "{policy} chooses among token labels, so it needs {format:text} or completion, got {format:=}",
            why="A classification has one label per example.",
            options={"format": ("classification",)},
        ),
        at_linears("Node gradients are stored by an index among all positions."),
        not_with("segments", GIVEN, "it runs layers only for some positions"),
    ),
)
