"""Keep a random projection of the rows of each linear's input for the gradient of its weight.

Daniel Bershatsky, Aleksandr Mikhalev, Alexandr Katrutsa, Julia Gusak, Daniil Merkulov and Ivan Oseledets,
"Memory-Efficient Backpropagation through Large Linear Layers" (2022), https://arxiv.org/abs/2201.13195. We differ: our
matrix has entries +1 and -1. ``entries: gaussian`` selects their default, which has more variance. We do not support
their discrete Fourier and cosine matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Site, Step, choice
from sparsebp_shelf.saver import InputSaver, SavedSketch

if TYPE_CHECKING:
    from torch import Tensor


@final
class Sketch(InputSaver):
    """Project the rows of an input randomly onto fewer, and the gradient's rows in the same way; unbiased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Only if keep * N is far below D * O / (D + O). Otherwise the projection costs more FLOPs than it saves.",
        year=2022,
        saves=("memory",),
        work="(2 + keep * (1 + N / D + N / O)) / 3",
        memory="keep * N * D entries of each input.",
        claimed="Half of the linear layers' memory, and less than one point less accuracy; RoBERTa on GLUE.",
        code="Not read.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.2,
        description=(
            "Number of rows after the projection, as a fraction of the input's rows, in (0, 1]; 1.0 is dense."
        ),
    )
    entries: Literal["rademacher", "gaussian"] = Field(
        "rademacher",
        description="Entries of the random projection matrix. rademacher: +1 or -1. gaussian: normally distributed.",
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def form(self) -> type[SavedSketch] | None:
        return None if self.exact else SavedSketch

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedSketch | None:
        if self.exact:
            return None
        num_kept = choice.count_kept(self.keep, len(x_ND))
        return SavedSketch.of(x_ND, num_kept, step.generator(site, x_ND.device), self.entries)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedSketch.count_bytes(choice.count_kept(self.keep, num_rows), num_features, itemsize)
