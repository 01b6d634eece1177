"""Leave residual blocks out of the backward at random, attention and MLP apart.

Sunghyeon Woo, Baeseong Park, Byeongwook Kim, Minjung Jo, Se Jung Kwon, Dongsuk Jeon and Dongsoo Lee, "DropBP:
Accelerating Fine-Tuning of Large Language Models by Dropping Backward Propagation" (NeurIPS 2024),
https://arxiv.org/abs/2402.17812. We differ: every block has the same rate, without the paper's adaptation to
sensitivity; the number of dropped blocks is the rate times their number at every step, where the paper draws each on
its own and adds some if there are too few; and the choice is made before the step, where the paper's code draws it in
the module, so that a forward repeated by checkpointing may disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, final

from pydantic import Field

from sparsebp_cli.policy import BlockDropper, DropDraw, ResidualBlock, Step


@final
class DropBP(BlockDropper):
    """Drop residual blocks from the backward, other ones at each step."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="Share of the residual blocks whose backward runs, in (0, 1]; 1.0 is dense. If it is no whole "
        "number of blocks, one more runs at some steps, so that this is the mean."
    )

    @property
    def budget(self) -> float:
        return self.keep

    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> Collection[str]:
        if self.exact:
            return ()
        import torch

        generator = step.generator(DropDraw())
        fraction = float(torch.rand((), generator=generator, dtype=torch.float64))
        number = int((1.0 - self.keep) * len(blocks) + fraction)  # rounded up as often as makes the mean right
        order = torch.randperm(len(blocks), generator=generator)
        return [blocks[place].name for place in order[:number].tolist()]
