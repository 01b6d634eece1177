"""The kind of policy that selects the positions of a batch that are trained, and those that carry gradient.

Shape letters: B examples, T positions. Position t predicts the token at t + 1. A property of a position refers to that
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
from sparsebp_cli.policy.rule import GIVEN, Rule, at_linears, not_with, whole_weights

if TYPE_CHECKING:
    import torch

Score = Literal["loss", "entropy", "gradient_norm", "reference_loss", "attention", "last_gradient", "update"]
TokenMode = Literal["exact", "detach", "stop"]


@dataclass(frozen=True)
class Tokens:
    """A batch as a token selector sees it.

    Args:
        input_ids_BT: Token ids; None if the model receives embeddings.
        target_BT: Whether the labels train the position's prediction.
        real_BT: Whether the position is no padding.
        scores: Scores that the policy needs, by name, each (B, T) in float32 and 0 where there is no target: ``loss``
            in nats and ``entropy`` in nats of the model at this step, ``gradient_norm``, the 2-norm of the loss'
            gradient with respect to the position's logits, and ``reference_loss`` of the reference model; ``attention``
            that all positions but padding give to this one in the last layer, in the mean over its heads;
            ``last_gradient``, the 2-norm of the gradient of the batch's summed loss at the input of the last layer; and
            ``update``, the sum over layers of the 2-norm of what a layer adds to the residual stream.
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
        carries_BT: Positions that carry gradient, at least the trained ones, and no padding; the modes
            ``detach`` and ``stop`` use it.
        weight_BT: Factor of the loss of each trained position, (B, T), floating-point, finite, at least 0; what it is
            elsewhere is ignored. 1 / probability makes a random choice unbiased. None: the loss is the mean of the
            trained positions. Weights need the model's own loss, so the labels among its arguments.
        denominator: Divisor of the sum of the weighted losses: all ``targets``, trained or not, or the ``weights`` of
            the trained ones, which makes it a weighted mean; biased. Without weights it has no meaning.
    """

    trained_BT: torch.Tensor
    carries_BT: torch.Tensor
    weight_BT: torch.Tensor | None = None
    denominator: Literal["targets", "weights"] = "targets"


class TokenSelector(ReferenceReader):
    """Selects the positions that are trained and those that carry gradient, before the forward that training
    differentiates. It receives the scores of a forward without gradients if it needs them. All token selectors have
    ``mode`` and the options of a reference; the engine implements them."""

    mode: TokenMode = Field(
        "exact",
        description="exact: the gradient of the masked loss, without the work that it does not need. detach: keys and "
        "values of positions that carry no gradient are constants in every layer; biased, and much faster. stop: their "
        "gradient trains the weights that make them, and ends at the input of the layer; biased less than detach.",
    )

    @property
    @abstractmethod
    def needs(self) -> frozenset[Score]:
        """Scores that ``choose`` reads with these options; each costs a forward, which is counted."""

    @property
    def reads_reference(self) -> bool:
        """Whether ``needs`` has the loss of a reference."""
        return "reference_loss" in self.needs

    @property
    def reads(self) -> frozenset[str]:
        """Columns of the data that ``choose`` reads with these options."""
        return frozenset()

    @property
    def candidate_column(self) -> str | None:
        """The one of these columns that marks trainable labels, 0 or 1 a token; None: all labels are trainable.

        Trainable targets all have the same weight, also with gradient accumulation and on several processes.
        """
        return None

    @property
    def fits_head(self) -> bool:
        """Whether ``choose`` can be asked under a fused head, whose trainer computes a loss of its own from the values
        of all labels. It then gets these as one example (1, T) that has nothing else: no ids, no columns, and no score
        but ``loss`` and ``entropy``. What it does not choose has no gradient; the loss stays that of all."""
        return False

    @property
    @abstractmethod
    def budget(self) -> float | None:
        """Share of the targets that is trained once schedules have ended, in (0, 1]; None if it depends on the data."""

    @abstractmethod
    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        """Select positions.

        Args:
            tokens: The batch. It must not be changed.
            step: The step of the decision; ``step.generator(tokens, device)`` is the only source of randomness allowed.

        Returns:
            The positions that are trained, and those that carry gradient.
        """


def _find_facts(policy: TokenSelector) -> Mapping[str, object]:
    return {
        "mode": policy.mode,
        "differentiates": "last_gradient" in policy.needs,
        "trains_all": not policy.needs and policy.budget == 1.0,
        "columns": policy.reads,
        "candidate_column": policy.candidate_column,
        "fits_head": policy.fits_head,
    }


TOKEN_SELECTOR = Kind(
    TokenSelector,
    asked="Decides before each forward of training, by the scores that it needs, whose cost is counted. "
    "Exact if all targets are trained and all gradient is carried; unbiased if they are drawn from the whole "
    "batch and all gradient is carried. [Train only some tokens or examples](../guide/tokens.md)\n",
    # Beside a packer of rows it chooses among the labels first, so it comes around it.
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
            "{policy} chooses among the labels of tokens: needs {format:text} or completion, got {format:=}",
            why="A classification has one label an example. Without keep and a score other than mask, carry chooses "
            "the positions that carry gradient.",
            policy={"trains_all": (False,)},
            options={"format": ("classification",)},
        ),
        not_with("format", ("regression",), "it computes losses that are a cross-entropy"),
        at_linears("Branches and nodes store tensors by their index among all positions."),
        whole_weights(
            "its score differentiates the last layer inside of the forward", facts={"differentiates": (True,)}
        ),
        not_with("segments", GIVEN, "it runs layers for some positions only"),
    ),
)
