"""Backpropagate the examples of large loss more often.

Angela H. Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers" (2019),
https://arxiv.org/abs/1910.00762. We differ as Composer does: losses are ranked within the batch instead of a window of
past ones, and each batch gives the same number of examples. For language models ``scale_factor`` shortens the text that
the forward for the losses reads; for images Composer's shrinks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policies.sampled import SampledExamples
from sparsebp_cli.policy import Examples, MethodCard, Step

if TYPE_CHECKING:
    from torch import Tensor


@final
class SelectiveBackprop(SampledExamples):
    """Backpropagate examples drawn by the rank of their loss: probability (rank / B) ** (1 / keep - 1)."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where losses of examples differ widely and are reliable. Labels that are wrong have the largest "
        "losses. Compare with uniform.",
        year=2019,
        saves=("time", "memory"),
        work="keep + scale_factor / 3",
        memory="keep of the examples.",
        claimed="Target error up to 3.5 times as fast, convolutional networks on CIFAR-10.",
        code="angelajiang/SelectiveBackprop, Apache-2.0.",
    )

    scale_factor: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Share of the positions, from the first, that the forward for the losses reads, in (0, 1]."
    )

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def scored_share(self) -> float:
        return self.scale_factor

    @property
    def control(self) -> dict[str, object] | None:
        shared = self.model_dump(mode="json", include=set(SampledExamples.model_fields))
        return None if self.exact else {"name": "uniform", **shared}

    def needs_loss(self, step: Step) -> bool:
        return self.is_choosing(step)

    def choose(self, examples: Examples, step: Step) -> Tensor | None:
        import torch

        if not self.is_choosing(step):
            return None
        assert examples.loss_B is not None
        generator, number = step.generator(examples), examples.number
        shuffled = torch.randperm(number, generator=generator)  # breaks ties between equal losses at random
        ascending = shuffled[examples.loss_B.cpu()[shuffled].argsort(stable=True)]
        # Middles of the ranks, so that the smallest loss has a nonzero probability; the exponent is Composer's.
        chance = ((torch.arange(number, dtype=torch.float64) + 0.5) / number) ** (1.0 / self.keep - 1.0)
        # Gumbel top-k: the largest of log(chance) + Gumbel noise are a draw without replacement. In log space no
        # chance underflows.
        noise = -torch.rand(number, generator=generator, dtype=torch.float64).clamp(min=1e-300).log()
        drawn = (chance.log() - noise.log()).topk(self.count_chosen(number)).indices
        return ascending[drawn].sort().values
