"""Skip the tiles of attention with the least weight in the backward; the forward is exact.

BackLite, moonmath.ai (2026), https://github.com/moonmath-ai/BackLite. As in its code, the tiles of one tile of keys are
sorted by their fraction of the attention that these keys receive. The smallest are skipped as long as their sum stays
below ``negligible``. So a value tile's gradient loses at most that fraction of its attention weights. We differ: its
kernel records each tile's weight in the forward. We compute all scores again in the backward, and the other four
products tile by tile. A warm-up is a schedule of ``negligible``.

Cost: with the fraction k of the tiles kept, the backward of attention computes 1 + 4 k of its five products. Without
its own kernel it is slower than dense: use it to learn what the skipped tiles cost in quality.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field
from typing_extensions import override

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.tile.kind import AttentionTiles, TileSelector

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@final
class BackLite(TileSelector):
    """Skip the tiles whose attention weights are negligible, in the backward."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To study what skipped tiles do to quality on long sequences. It is slower than dense here.",
        year=2026,
        work="1",
        memory="As dense; in the backward the attention weights of one example.",
        claimed="A 2.1 % shorter training of a nanochat model at 0.27 % more bits per byte (an entry of that project).",
        code="BSD-3-Clause and MIT; a kernel for H100 alone.",
    )

    negligible: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.05, description="Share of the attention that each tile of keys receives and that may be skipped, in [0, 1)."
    )
    tile: Annotated[int, Field(ge=1)] = Field(64, description="Queries and keys of a tile.")
    score: Literal["mass", "random"] = Field(
        "mass", description="What is skipped: the tiles with the least weight, or as many at random, as a control."
    )

    @property
    def exact(self) -> bool:
        return self.negligible == 0.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def tile_size(self) -> int:
        return self.tile

    @property
    @override
    def control(self) -> Mapping[str, object] | None:
        if self.score == "random" or self.exact:
            return None
        return {"name": "backlite", **self.model_dump(exclude={"score"}), "score": "random"}

    def select(self, mass_HQK: torch.Tensor, tiles: AttentionTiles, step: Step) -> torch.Tensor:
        import torch

        share_HQK = mass_HQK / mass_HQK.sum(1, keepdim=True).clamp_min(torch.finfo(mass_HQK.dtype).tiny)
        sorted_HQK, order_HQK = share_HQK.sort(dim=1, stable=True)
        num_skipped_H1K = (sorted_HQK.cumsum(1) < self.negligible).sum(1, keepdim=True)
        if self.score == "random":  # excluded tiles first, as above
            generator = step.generator(tiles, mass_HQK.device)
            drawn_HQK = torch.rand(mass_HQK.shape, generator=generator, device=mass_HQK.device)
            order_HQK = torch.where(mass_HQK > 0.0, drawn_HQK, -1.0).argsort(1)
        return order_HQK.argsort(1) >= num_skipped_H1K
