"""Keep a random part of each gradient: the control that every other policy must beat at the same budget.

With ``weighted``, the estimator of Menachem Adelman, Kfir Y. Levy, Ido Hakimi and Mark Silberstein, "Faster Neural
Network Training with Approximate Tensor Operations" (NeurIPS 2021), https://arxiv.org/abs/1805.08079, with uniform
probabilities. We differ: one choice, without replacement, serves the gradients of both input and weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, final

from pydantic import Field

from sparsebp_cli.policy import BackwardShare, Columns, Elements, GradientSelector, Rows, Selection, Site, Step

if TYPE_CHECKING:
    import torch


@final
class Random(GradientSelector):
    """Keep rows, columns or elements drawn uniformly."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Share that is kept, in (0, 1]; 1.0 is dense.")
    along: Literal["rows", "columns", "elements"] = Field(
        "rows", description="What is drawn: token rows, output features, or single entries of the whole gradient."
    )
    weighted: bool = Field(
        False, description="Multiply what is kept by 1 / its probability: a site's gradient is then unbiased."
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return self.weighted or self.exact

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def backward_share(self) -> BackwardShare:
        share = 1.0 if self.along == "elements" else self.keep
        return BackwardShare(share, share)

    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        import torch

        if self.keep == 1.0:
            return None
        num_rows, num_columns = grad_NO.shape
        count = {"rows": num_rows, "columns": num_columns, "elements": grad_NO.numel()}[self.along]
        num_kept = max(1, round(self.keep * count))
        generator = step.generator(site, grad_NO.device)
        index_K = torch.randperm(count, generator=generator, device=grad_NO.device)[:num_kept]
        weight = count / num_kept if self.weighted else 1.0  # the probability is num_kept / count, not keep
        if self.along == "elements":
            mask = torch.zeros(count, dtype=torch.bool, device=grad_NO.device)
            return Elements(mask.index_fill_(0, index_K, True).view(grad_NO.shape), weight)
        # In order, so that the gathers walk through memory forwards.
        index_K = index_K.sort().values
        dtype = torch.promote_types(grad_NO.dtype, torch.float32)
        weight_K = torch.full((num_kept,), weight, dtype=dtype, device=grad_NO.device) if self.weighted else None
        return Rows(index_K, weight_K) if self.along == "rows" else Columns(index_K, weight_K)
