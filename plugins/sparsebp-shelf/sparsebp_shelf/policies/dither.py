"""Round gradient entries up or down at random, to multiples of a step so wide that most entries become 0.

Simon Wiedemann, Temesgen Mehari, Kevin Kepp and Wojciech Samek, "Dithered Backprop: A Sparse and Quantized
Backpropagation Algorithm for More Efficient Deep Neural Network Training" (CVPR 2020 workshop),
https://arxiv.org/abs/2004.04729. The paper adds uniform noise of the step's width and rounds to the nearest multiple.
We round up with a probability: the distance to the multiple below, divided by the step's width. The distribution is the
same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import GradientSelector, MethodCard, Selection, Site, Step, Values

if TYPE_CHECKING:
    from torch import Tensor


@final
class Dither(GradientSelector):
    """Round a gradient at random to multiples of its standard deviation times ``scale``."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To learn how the noise of coarse gradients affects training. SparseBP does not use the zero entries to "
        "save time.",
        year=2020,
        work="1",
        memory="As dense.",
        claimed="On average 92 % zeros, and at most 8 bits for other entries, with nearly the same accuracy; image "
        "classification (abstract).",
        code="Not found.",
    )

    scale: Annotated[float, Field(ge=0.0)] = Field(
        2.0,
        description=(
            "Step of the rounding, as a multiple of the standard deviation of the gradient's entries; 0.0 is dense."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.scale == 0.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Values

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        import torch

        if self.exact:
            return None
        wide_NO = grad_NO.to(torch.promote_types(grad_NO.dtype, torch.float32))
        width = self.scale * wide_NO.std(correction=0)
        generator = step.generator(site, grad_NO.device)
        shift_NO = torch.rand(wide_NO.shape, generator=generator, dtype=wide_NO.dtype, device=wide_NO.device)
        level_NO = (wide_NO / torch.where(width == 0.0, 1.0, width) + shift_NO).floor()
        return Values(torch.where(width == 0.0, wide_NO, level_NO * width).to(grad_NO.dtype))
