"""Keep the largest part of each gradient.

Xu Sun, Xuancheng Ren, Shuming Ma and Houfeng Wang, "meProp: Sparsified Back Propagation for Accelerated Deep Learning
with Reduced Overfitting" (ICML 2017), https://arxiv.org/abs/1706.06197. We differ: they choose k entries in each row;
we choose whole token rows, whole output features, or single entries over the whole gradient, and rows and features by
their L2 norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, final

from pydantic import Field

from sparsebp_cli.policy import BackwardShare, Columns, Elements, GradientSelector, Rows, Selection, Site, Step

if TYPE_CHECKING:
    import torch


@final
class TopK(GradientSelector):
    """Keep the rows, columns or elements of largest norm."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Share that is kept, in (0, 1]; 1.0 is dense.")
    along: Literal["rows", "columns", "elements"] = Field(
        "rows", description="What is chosen: token rows, output features, or single entries of the whole gradient."
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
    def backward_share(self) -> BackwardShare:
        share = 1.0 if self.along == "elements" else self.keep
        return BackwardShare(share, share)

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:  # noqa: ARG002 - same always
        import torch

        if self.keep == 1.0:
            return None
        if self.along == "elements":
            size = grad_NO.abs().flatten()
        else:  # norms of bfloat16 entries are summed in float32
            dtype = torch.promote_types(grad_NO.dtype, torch.float32)
            if self.along == "rows":
                size = torch.linalg.vector_norm(grad_NO, dim=1, dtype=dtype)
            else:  # in the order of the norms; vector_norm over columns takes ten times as long (torch 2.13, CPU)
                size = grad_NO.to(dtype).square().sum(0)
        num_kept = max(1, round(self.keep * size.numel()))
        index_K = size.topk(num_kept, sorted=False).indices
        if self.along == "elements":
            mask = torch.zeros(size.numel(), dtype=torch.bool, device=grad_NO.device)
            return Elements(mask.index_fill_(0, index_K, True).view(grad_NO.shape))
        # In order, so that the gathers walk through memory forwards.
        index_K = index_K.sort().values
        return Rows(index_K) if self.along == "rows" else Columns(index_K)
