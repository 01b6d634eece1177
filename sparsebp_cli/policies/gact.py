"""Keep each linear's input in a few bits for the gradient of its weight.

Xiaoxuan Liu, Lianmin Zheng, Dequan Wang, Yukuo Cen, Weize Chen, Xu Han, Jianfei Chen, Zhiyuan Liu, Jie Tang, Joey
Gonzalez, Michael Mahoney and Alvin Cheung, "GACT: Activation Compressed Training for Generic Network Architectures"
(ICML 2022), https://arxiv.org/abs/2206.11357, whose grid and rounding are those of Jianfei Chen et al., "ActNN" (ICML
2021), https://arxiv.org/abs/2104.14129. We differ: the inputs of linears alone are rounded, where GACT rounds whatever
autograd saves; so the gradients of inputs are exact and those of weights unbiased through the whole model, where
rounding what a nonlinear operator saves leaves a bias. All inputs have the same number of bits, without GACT's
automatic precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import InputSaver, MethodCard, SavedCodes, Site, Step

if TYPE_CHECKING:
    from torch import Tensor


@final
class GACT(InputSaver):
    """Round each group of an input's entries to a grid between its smallest and its largest one."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where activations do not fit and computing layers again costs too much. Changes the gradient least "
        "of all savers.",
        year=2022,
        saves=("memory",),
        work="1",
        memory="N D (bits / 8 + 8 / group) bytes of an input.",
        claimed="Activations 8.1 times smaller, with convolutional, graph and transformer networks.",
        measured="82 % of a step's saved bytes with 4 bits, since norms, attention and activation functions keep "
        "theirs (guide, saved).",
        code="LiuXiaoxuanPKU/GACT-ICML, no licence seen; read for no part of this.",
    )

    bits: Literal[2, 4, 8, 32] = Field(4, description="Bits of an entry; 32 keeps the input as it is.")
    group: Annotated[int, Field(ge=8, multiple_of=8)] = Field(256, description="Entries that share a grid.")
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="Up or down at random, so that the mean is the entry, or to the nearest, with a bias."
    )

    @property
    def exact(self) -> bool:
        return self.bits == 32

    @property
    def unbiased(self) -> bool:
        return self.exact or self.rounding == "stochastic"

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def form(self) -> type[SavedCodes] | None:
        return None if self.exact else SavedCodes

    @property
    def control(self) -> dict[str, object] | None:
        if self.unbiased:
            return None
        return {"name": "gact", **self.model_dump(mode="json"), "rounding": "stochastic"}

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedCodes | None:
        if self.exact:
            return None
        generator = step.generator(site, x_ND.device) if self.rounding == "stochastic" else None
        return SavedCodes.of(x_ND, self.bits, self.group, generator)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedCodes.count_bytes(num_rows * num_features, self.bits, self.group, itemsize)
