"""Keep a few rows of each linear's input, and for every row the nearest of them and its length along it.

Khalaf and others, "PAMM" (ICLR 2026), https://arxiv.org/abs/2506.02939, after its abstract and formulas: no code is
public. Rows are drawn uniformly as representatives. Each row of the input becomes its projection on the representative
whose direction, or opposite direction, is nearest. The weight gradient first sums the output gradients by
representative, which saves both memory and multiplications. It is biased. We differ: every linear may use it (the paper
uses it for queries, keys and values; select them with `where`). The paper rescales to correct for rows too far from
every representative (`epsilon`); our rescaling counts rows, as we understand it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, Site, Step, choice
from sparsebp_shelf.saver import InputSaver, SavedRepresentatives

if TYPE_CHECKING:
    from torch import Tensor


@final
class PAMM(InputSaver):
    """Keep a few rows of an input, and replace every row by its projection onto the nearest of them; biased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where the rows of an input point in few directions; look at the cosine first. Biased.",
        year=2026,
        saves=("memory", "time"),
        work="(2 + keep * (1 + N / O)) / 3",
        memory="keep N D entries, and a number and a factor for each row.",
        claimed="Inputs of attention up to 512 times smaller without loss of quality (abstract).",
        code="Not public.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1 / 128,
        description=(
            "Number of representative rows, as a fraction of the rows of an input, in (0, 1]; 1.0 is dense. The "
            "paper: 1/128 to 1/512."
        ),
    )
    epsilon: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None,
        description=(
            "Leave out rows whose distance to their projection is more than this fraction of their length. The "
            "other rows are multiplied by the number of all rows divided by the number of the others. null: leave "
            "out none."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def form(self) -> type[SavedRepresentatives] | None:
        return None if self.exact else SavedRepresentatives

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact:
            return None
        shared = self.model_dump(mode="json", exclude={"epsilon"})
        return {"name": "wta-crs", **shared, "by": "uniform"}

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedRepresentatives | None:
        if self.exact:
            return None
        import torch

        num_rows, generator = len(x_ND), step.generator(site, x_ND.device)
        order = torch.randperm(num_rows, generator=generator, device=x_ND.device)
        return SavedRepresentatives.of(x_ND, order[: choice.count_kept(self.keep, num_rows)], self.epsilon)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        num_kept = choice.count_kept(self.keep, num_rows)
        return SavedRepresentatives.count_bytes(num_kept, num_rows, num_features, itemsize)
