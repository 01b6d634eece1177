"""Train the tokens that occur least often in the batch; the policy reads only the token ids."""

from typing import TYPE_CHECKING

from sparsebp_cli.policy import Score, ScoredTokenSelector, Step, Tokens

if TYPE_CHECKING:
    import torch


class Rare(ScoredTokenSelector):
    """Score each position by how rarely its target token occurs in the batch."""

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def needs(self) -> frozenset[Score]:
        return frozenset()

    def score_tokens(self, tokens: Tokens, step: Step) -> "torch.Tensor | None":  # noqa: ARG002
        ids_BT = tokens.input_ids_BT
        assert ids_BT is not None, "rare needs input_ids"
        number = ids_BT.flatten().bincount()  # occurrences of each token
        # Position t predicts token t + 1. The roll moves the first token to the last position, which is never a target.
        return -number[ids_BT.roll(-1, dims=1)].float()
