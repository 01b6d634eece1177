"""Keep one number for each group of features of a linear's input: how far it goes along one direction.

Roy Miles, Pradyumna Reddy, Ismail Elezi and Jiankang Deng, "VeLoRA: Memory Efficient Training using Rank-1 Sub-Token
Projections" (NeurIPS 2024), https://arxiv.org/abs/2405.17991, after its abstract and formulas. We differ: the direction
is the mean of the input's own groups, not that of the first batch, so nothing has to be kept between steps; and groups
have nearly the size that is asked for, so that all of an input's are equal. The paper projects the inputs of values and
of the MLP's last linear alone: say so with ``where``, as `recipes/velora.yaml` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, final

from pydantic import Field, PositiveInt

from sparsebp_cli.policy import InputSaver, MethodCard, SavedDirection, Site, Step, choice

if TYPE_CHECKING:
    from torch import Tensor


@final
class VeLoRA(InputSaver):
    """Keep the projection of each group of neighbouring features on one direction; the gradient is biased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To see how much of an input one direction holds. In float32 gact with 2 bits keeps about as much "
        "as groups of 16, and is unbiased.",
        year=2024,
        saves=("memory", "time"),
        work="(2 + 1 / group) / 3",
        memory="N D / group entries of an input.",
        claimed="Less memory than QLoRA and GaLore at their quality, LLaMA and RoBERTa (abstract).",
        code="roymiles/VeLoRA; not read.",
    )

    group: PositiveInt = Field(32, description="Features of a group, about; 1 is dense.")
    by: Literal["mean", "random"] = Field(
        "mean", description="The direction: the mean of the groups, or drawn at random, the control."
    )

    @property
    def exact(self) -> bool:
        return self.group == 1

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> float:
        return 1.0 / self.group

    @property
    def form(self) -> type[SavedDirection] | None:
        return None if self.exact else SavedDirection

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "velora", **self.model_dump(mode="json"), "by": "random"}

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedDirection | None:
        if self.exact:
            return None
        import torch

        _, size = self._divide(x_ND.shape[1])
        direction_C = SavedDirection.mean_direction(x_ND, size)
        if self.by == "random":
            generator = step.generator(site, x_ND.device)
            direction_C = torch.randn(size, generator=generator, dtype=direction_C.dtype, device=x_ND.device)
            direction_C = direction_C / torch.linalg.vector_norm(direction_C)
        return SavedDirection.of(x_ND, direction_C)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedDirection.count_bytes(*self._divide(num_features), num_rows, itemsize)

    def _divide(self, num_features: int) -> tuple[int, int]:
        """Return the number of groups, and the features of each."""
        size = -(-num_features // choice.count_kept(self.budget, num_features))
        return -(-num_features // size), size
