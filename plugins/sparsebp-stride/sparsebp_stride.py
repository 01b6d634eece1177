"""Keep every n-th token row, and start one row later at each step, so that every row gets its turn."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sparsebp_cli.policy import GradientSelector, Rows, Selection, Site, Step

if TYPE_CHECKING:
    import torch


class Stride(GradientSelector):
    """Keep rows ``offset, offset + every, ...``; the offset is the step's number modulo ``every``."""

    every: Annotated[int, Field(ge=1)] = Field(description="Keep every N-th token row of each gradient; 1 is dense.")

    @property
    def exact(self) -> bool:
        return self.every == 1

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> float:
        return 1 / self.every

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Rows

    def select(self, grad_NO: "torch.Tensor", site: Site, step: Step) -> Selection | None:  # noqa: ARG002
        from torch import arange

        offset = step.index % min(self.every, len(grad_NO))
        return None if self.exact else Rows(arange(offset, len(grad_NO), self.every, device=grad_NO.device))
