"""Estimate the gradient along a random direction from two forwards, without a backward.

Sadhika Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
https://arxiv.org/abs/2305.17333, Definition 1 and Algorithm 1. Our ``scale`` is epsilon of the paper. With z drawn from
a normal distribution, the estimate is (loss(w + scale z) - loss(w - scale z)) / (2 scale) * z. With ``optim: sgd`` and
``max_grad_norm: null`` a step equals the paper's. We differ in two points. The recipe's optimizer gets the estimate
as the gradient, so any optimizer works. Weights are restored bit by bit from a copy; the paper subtracts what it added,
which leaves rounding errors. This needs memory that the paper does not need: the copy, which becomes the gradient, is
as large as the trained weights, and with accumulation there are two. The paper's appendix averages several directions;
micro-batches share one here.

Cost: two forwards and no backward, and nothing is saved for one. Use it as the control that shows what a backward adds,
or if no backward fits into memory: with adapters, the copy has the size of the adapters. Do not use it to train faster.
The error of one estimate grows with the number of trained weights: its cosine with the gradient is about 1 /
sqrt(weights). It needs far smaller learning rates and many times the steps. In float16 and bfloat16, rounding swallows
small shifts, so the estimate is biased there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.estimator.kind import GradientEstimator

if TYPE_CHECKING:
    import torch


@final
class MeZO(GradientEstimator):
    """Estimate the gradient from the losses on both sides of the weights along random directions."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As the control that shows what a backward adds, or where no backward fits into "
        "memory. Not to train faster.",
        year=2023,
        saves=("memory",),
        work="2 / 3",
        memory="No activation; a copy of the trained weights, which becomes the gradient.",
        claimed="Comparable with fine-tuning on 7 of 11 tasks at a twelfth of the memory, OPT up to 66 billion "
        "parameters.",
        code="princeton-nlp/MeZO, MIT.",
    )

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("directions", 1),)

    scale: Annotated[float, Field(gt=0.0)] = Field(
        1e-3,
        description=(
            "Factor of the random direction that is added to the weights in one forward and subtracted in another, "
            "above 0."
        ),
    )

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def shifts(self) -> Sequence[float]:
        return self.scale, -self.scale

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        import torch

        return torch.randn(tuple(shape), generator=generator, device=generator.device)

    def estimate(self, loss_S: Sequence[float], step: Step) -> float:  # noqa: ARG002 - a contract
        above, below = loss_S
        return (above - below) / (2.0 * self.scale)
