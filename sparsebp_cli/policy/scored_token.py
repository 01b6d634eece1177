"""The base class of token selectors that score every position and train the largest scores.

All selections are by count. No operation waits for a device: a position is kept if its rank is below a count that
remains a tensor. Shape letters: B examples, T positions.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sparsebp_cli.policy.contract import Step
from sparsebp_cli.policy.token import TokenChoice, Tokens, TokenSelector

if TYPE_CHECKING:
    from torch import Tensor

Quantile = Annotated[float, Field(ge=0.0, le=1.0)]


class ScoredTokenSelector(TokenSelector):
    """A token selector that scores every position. A plugin implements :meth:`score_tokens`, :attr:`needs` and
    :attr:`unbiased`."""

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (
        ("keep_warmup_steps", 0),
        ("carry", "trained"),
        ("carry_column", None),
        ("carry_keep", None),
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="Fraction of the target tokens to train, in (0, 1]: those with the largest scores. null: all, "
        "unless band is given.",
    )
    within: Literal["batch", "example"] = Field(
        "batch", description="batch: choose among all target tokens of the batch. example: in each example separately."
    )
    band: tuple[Quantile, Quantile] | None = Field(
        None,
        description="Instead of keep: train the target tokens whose scores lie between these two quantiles, such as "
        "[0.2, 0.7].",
    )
    mask_column: str | None = Field(
        None, description="Column of the data that marks the trainable tokens; null: all tokens with a label."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.keep is not None and self.band is not None:
            raise ValueError("give either keep or band: each of them selects the trained tokens")
        if self.band is not None and not self.band[0] < self.band[1]:
            raise ValueError(f"band must be [low, high] with low below high, got [{self.band[0]}, {self.band[1]}]")
        return self

    @abstractmethod
    def score_tokens(self, tokens: Tokens, step: Step) -> Tensor | None:
        """Score the positions of a batch.

        Args:
            tokens: The batch. It must not be changed.
            step: The step of the decision; ``step.generator(tokens, device)`` is the only source of randomness allowed.

        Returns:
            (B, T), finite; the largest scores are trained. Scores outside of targets are ignored. None trains all
            targets.
        """

    @property
    def exact(self) -> bool:
        all_trained = self.mask_column is None and self.band in (None, (0.0, 1.0)) and self.keep in (None, 1.0)
        return all_trained and self.mode == "exact"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset() if self.mask_column is None else frozenset({self.mask_column})

    @property
    def candidate_column(self) -> str | None:
        return self.mask_column

    @property
    def budget(self) -> float | None:
        if self.mask_column is not None:
            return None
        return self.band[1] - self.band[0] if self.band is not None else self.keep or 1.0

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        trained_BT, weight_BT = tokens.target_BT, None
        if self.mask_column is not None:
            trained_BT = trained_BT & _at_predictor(tokens.columns[self.mask_column])
        score_BT = self.score_tokens(tokens, step)
        if score_BT is not None:
            trained_BT, weight_BT = self.pick(score_BT, trained_BT, tokens, step)
        return TokenChoice(trained_BT, trained_BT, weight_BT)

    def pick(
        self,
        score_BT: Tensor,
        candidate_BT: Tensor,
        tokens: Tokens,  # noqa: ARG002 - for overrides
        step: Step,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:
        """Return which candidates are trained, and the weights of their losses. Without an override, choose the
        candidates of largest score, without weights.

        Args:
            score_BT: The result of :meth:`score_tokens`.
            candidate_BT: Targets that may be trained.
            tokens: The batch, with its targets and columns.
            step: The step of the decision, with the source of randomness.

        Returns:
            Boolean, (B, T), and weights as in :class:`~sparsebp_cli.policy.TokenChoice`.
        """
        return self._largest(score_BT, candidate_BT), None

    def _largest(self, score_BT: Tensor, candidate_BT: Tensor) -> Tensor:
        """Return the candidates between two ranks, over the whole batch or within each example."""
        import torch

        shape = candidate_BT.shape
        groups = shape[0] if self.within == "example" else 1
        candidate = candidate_BT.reshape(groups, -1)
        score = score_BT.reshape(groups, -1).masked_fill(~candidate, -torch.inf)
        order = score.argsort(dim=1, descending=True, stable=True)  # candidates first: their scores are finite
        number = candidate.sum(1, keepdim=True)
        low, high = self.band or (0.0, 1.0)
        share = (self.keep or 1.0) if self.band is None else high - low
        count = (share * number.double()).round().clamp(min=1).minimum(number)  # half to even, as Python's round()
        first = ((1.0 - high) * number.double()).round().minimum(number - count)
        rank = torch.arange(candidate.shape[1], device=candidate.device)
        return torch.zeros_like(candidate).scatter(1, order, (rank >= first) & (rank < first + count)).view(shape)


def _at_predictor(column_BT: Tensor) -> Tensor:
    """Shift a column to the positions that predict its tokens, as a mask."""
    from torch.nn.functional import pad

    return pad(column_BT[:, 1:] != 0, (0, 1))
