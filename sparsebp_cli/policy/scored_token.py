"""The base class of token selectors that score every position and train the largest scores.

All selections are by count. No operation waits for a device: a position is kept if its rank is below a count that
remains a tensor. Shape letters: B examples, T positions.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from sparsebp_cli.policy.contract import Step
from sparsebp_cli.policy.token import TokenChoice, Tokens, TokenSelector

if TYPE_CHECKING:
    from torch import Tensor


class ScoredTokenSelector(TokenSelector):
    """A token selector that scores every position. A plugin implements :meth:`score_tokens`, :attr:`needs` and
    :attr:`unbiased`."""

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (
        ("keep_warmup_steps", 0),
        ("band", None),
        ("carry", "trained"),
        ("carry_column", None),
        ("carry_keep", None),
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="Fraction of the target tokens to train, in (0, 1]: those with the largest scores. null: all.",
    )
    within: Literal["batch", "example"] = Field(
        "batch", description="batch: choose among all target tokens of the batch. example: in each example separately."
    )
    mask_column: str | None = Field(
        None, description="Column of the data that marks the trainable tokens; null: all tokens with a label."
    )

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
        all_trained = self.mask_column is None and self.keep in (None, 1.0)
        return all_trained and self.mode == "exact"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset() if self.mask_column is None else frozenset({self.mask_column})

    @property
    def candidate_column(self) -> str | None:
        return self.mask_column

    @property
    def budget(self) -> float | None:
        return None if self.mask_column is not None else self.keep or 1.0

    def choose(self, tokens: Tokens, step: Step) -> TokenChoice:
        trained_BT = tokens.target_BT
        if self.mask_column is not None:
            trained_BT = trained_BT & _at_predictor(tokens.columns[self.mask_column])
        score_BT = self.score_tokens(tokens, step)
        if score_BT is not None:
            trained_BT = self._largest(score_BT, trained_BT)
        return TokenChoice(trained_BT, trained_BT)

    def _largest(self, score_BT: Tensor, candidate_BT: Tensor) -> Tensor:
        """Return the candidates of largest score, over the whole batch or within each example."""
        import torch

        shape = candidate_BT.shape
        groups = shape[0] if self.within == "example" else 1
        candidate = candidate_BT.reshape(groups, -1)
        score = score_BT.reshape(groups, -1).masked_fill(~candidate, -torch.inf)
        order = score.argsort(dim=1, descending=True, stable=True)  # candidates first: their scores are finite
        number = candidate.sum(1, keepdim=True)
        share = self.keep or 1.0
        count = (share * number.double()).round().clamp(min=1).minimum(number)  # half to even, as Python's round()
        rank = torch.arange(candidate.shape[1], device=candidate.device)
        return torch.zeros_like(candidate).scatter(1, order, rank < count).view(shape)


def _at_predictor(column_BT: Tensor) -> Tensor:
    """Shift a column to the positions that predict its tokens, as a mask."""
    from torch.nn.functional import pad

    return pad(column_BT[:, 1:] != 0, (0, 1))
