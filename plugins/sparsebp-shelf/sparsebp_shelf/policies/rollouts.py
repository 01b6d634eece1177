"""Draw the answers of a policy update by their advantages, weighted so that the gradient stays that of all answers.

Yixuan Even Xu, Yash Savani, Fei Fang and J. Zico Kolter, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM
Reinforcement Learning" (2025), https://arxiv.org/abs/2504.13818, after the abstract: an update uses the answers of a
group whose rewards vary most. We differ: the paper's choice is deterministic and changes the gradient. Ours is drawn in
proportion to the size of the advantage, whose square is the answer's part of the reward's variance. Answers are
weighted by 1 / probability, as in :mod:`~sparsebp_shelf.policies.importance`. An answer without advantage, such as all
answers of a group with equal rewards, has no gradient and is drawn last.

Shape letters: B answers of a batch, K drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from sparsebp_cli.policy import Examples, MethodCard, Step
from sparsebp_shelf.example import KeptExamples, WeightedExamples

if TYPE_CHECKING:
    from torch import Tensor


@final
class Rollouts(KeptExamples):
    """Draw answers in proportion to their advantage, or uniformly if the loss has other terms."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="In trl's GRPOTrainer, where advantages differ or many are zero; all answers still have a forward, for the "
        "log. Where the batch says nothing of advantages, it is a smaller batch with weights: give uniform.",
        year=2025,
        saves=("time", "memory"),
        work="(1 + 2 * keep) / 3",
        memory="keep of the answers.",
        claimed="Faster to the same accuracy than GRPO on all answers (abstract).",
    )

    @property
    def unbiased(self) -> bool:
        return True

    @property
    @override
    def weighs(self) -> bool:
        return not self.exact

    @property
    @override
    def reads_weight(self) -> bool:
        return not self.exact

    @property
    @override
    def fits_head(self) -> bool:
        return True

    def needs_loss(self, step: Step) -> bool:  # noqa: ARG002
        return False

    def choose(self, examples: Examples, step: Step) -> WeightedExamples | None:
        import torch

        if self.exact:
            return None
        size_B: Tensor = torch.ones(examples.number) if examples.weight_B is None else examples.weight_B
        return WeightedExamples(*self.draw(size_B, examples, step))
