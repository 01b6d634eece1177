"""Leave whole layers out of forward and backward at random, in training only.

Angela Fan, Edouard Grave and Armand Joulin, "Reducing Transformer Depth on Demand with Structured Dropout" (ICLR 2020),
https://arxiv.org/abs/1909.11556. As published, each layer is left out independently with probability 1 - ``keep``,
outputs are not rescaled, and evaluation runs all layers. We differ in two points. One choice holds for a whole step, so
micro-batches, processes and recomputed layers agree. A layer is its attention and its MLP.

Cost: a layer that is left out needs no products in forward or backward and saves nothing. Each step trains a different,
shallower model, so the gradient is not that of the evaluated model. Use it as a regulariser, before you prune layers,
or as a control that saves the same FLOPs as `dropbp`. Do not use it for a short fine-tuning: the training loss differs
much from the loss of the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.block.kind import BlockDropper, DropDraw, ResidualBlock


@final
class LayerDrop(BlockDropper):
    """Leave each layer out of forward and backward with the same probability."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As a regulariser, or as a control for a policy that saves as many FLOPs. Not for short fine-tuning: it "
        "trains a shallower model.",
        year=2020,
        saves=("time", "memory"),
        work="keep",
        memory="Nothing of a layer that is left out.",
        claimed="A regulariser; after training, layers can be removed from the model. Machine translation and "
        "language models.",
        code="fairseq, MIT.",
    )

    skips_forward: ClassVar[bool] = True

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Probability that a layer is computed at a step, in (0, 1]; 1.0 is dense. The paper: 0.8."
    )

    @property
    def budget(self) -> float:
        return self.keep

    def drop(self, blocks: Sequence[ResidualBlock], step: Step) -> Collection[str]:
        import torch

        layers = list(dict.fromkeys(block.layer for block in blocks))
        drawn = torch.rand(len(layers), generator=step.generator(DropDraw())).tolist()
        out = {layer for layer, number in zip(layers, drawn, strict=True) if number >= self.keep}
        return [block.name for block in blocks if block.layer in out]
