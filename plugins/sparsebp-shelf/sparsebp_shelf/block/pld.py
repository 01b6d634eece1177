"""Leave residual blocks out of forward and backward, more often the deeper they are and the later the step is.

Minjia Zhang and Yuxiong He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer
Dropping" (NeurIPS 2020), https://arxiv.org/abs/2010.13369; written from the abstract and the published schedule. At
step t, theta(t) = (1 - theta) exp(-gamma t) + theta. Block i of L, counted from 1, runs with probability p_i = 1 - (i /
L) (1 - theta(t)), and its output is multiplied by 1 / p_i. This factor is from recollection, not from the paper's text.
We differ in two points. One choice holds for a whole step, so micro-batches, processes and recomputed layers agree. The
policy refuses models that normalise the residual stream after each block, such as the published BERT; the paper moves
their norms.

Cost: a dropped block needs no products in forward or backward and saves nothing. On average 1 - (1 + 1 / L) (1 -
theta(t)) / 2 of the blocks run. Use it in long trainings, since gamma counts steps, and as a control that saves the
same FLOPs. The mean of each output over draws is the dense one; the gradient is biased.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp
from typing import Annotated, ClassVar, final

from pydantic import Field
from typing_extensions import override

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.block.kind import BlockDropper, DropDraw, ResidualBlock


@final
class PLD(BlockDropper):
    """Leave out residual blocks with a probability that rises with depth and over the training."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where training is long, since gamma counts steps, or as the control of fewer FLOPs anyhow.",
        year=2020,
        saves=("time", "memory"),
        memory="Nothing of a block that is left out.",
        claimed="24 % less time a sample and 2.5 times as fast pretraining, BERT.",
        code="DeepSpeed, Apache-2.0.",
    )

    skips_forward: ClassVar[bool] = True
    takes_schedules: ClassVar[bool] = False

    theta: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5,
        description=(
            "Probability, late in the training, that the last block is computed at a step, in (0, 1]; 1.0 is dense."
        ),
    )
    gamma: Annotated[float, Field(gt=0.0)] = Field(
        0.001,
        description=(
            "Speed at which the probability falls from 1 to theta. After 1 / gamma optimizer steps, it has fallen "
            "63 % of the way."
        ),
    )

    @property
    def budget(self) -> float:
        return self.theta

    @override
    def budget_at(self, blocks: Sequence[ResidualBlock], step: Step) -> float:
        shares = self._shares(blocks, step)
        return max(self.theta, sum(shares.values()) / len(shares))

    @override
    def factors(self, blocks: Sequence[ResidualBlock], step: Step) -> Mapping[str, float]:
        return {name: 1.0 / share for name, share in self._shares(blocks, step).items()}

    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> Collection[str]:
        import torch

        drawn = torch.rand(len(blocks), generator=step.generator(DropDraw())).tolist()
        shares = self._shares(blocks, step)
        return [block.name for block, number in zip(blocks, drawn, strict=True) if number >= shares[block.name]]

    def theta_at(self, step: Step) -> float:
        """Return theta(t), the probability with which the last block runs.

        Args:
            step: The step, whose index is t.

        Returns:
            A probability.
        """
        return (1.0 - self.theta) * exp(-self.gamma * step.index) + self.theta

    def _shares(self, blocks: Sequence[ResidualBlock], step: Step) -> dict[str, float]:
        lost = 1.0 - self.theta_at(step)
        return {block.name: 1.0 - number / len(blocks) * lost for number, block in enumerate(blocks, 1)}
