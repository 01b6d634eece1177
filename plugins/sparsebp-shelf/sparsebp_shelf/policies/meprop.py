"""Keep the k largest entries of each row of a linear's gradient, or the k features that are largest over the batch.

Xu Sun, Xuancheng Ren, Shuming Ma and Houfeng Wang, "meProp: Sparsified Back Propagation for Accelerated Deep Learning
with Reduced Overfitting" (ICML 2017), https://arxiv.org/abs/1706.06197. We differ: k is a fraction of each linear's
features, because a transformer's linears have different widths (theirs: 30 of 512, keep 0.06, and 50 of 500 for the
unified form, keep 0.1). As in the paper, the bias gets the whole gradient, and the output layer is dense if `exclude`
names it. Single entries save work only if few are kept; the unified form saves the fraction that it leaves out. Their
later meSimp, which removes features that are never chosen, is not supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import (
    Columns,
    Elements,
    InformedSelector,
    MethodCard,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Step,
    choice,
)

if TYPE_CHECKING:
    from torch import Tensor


@final
class MeProp(InformedSelector):
    """Keep the largest entries of each row, or the features that are largest over the batch; the bias is dense."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="With unified: true, whose work is (1 + 2 keep) / 3; the other form is a reference for quality.",
        year=2017,
        saves=("time",),
        memory="As dense.",
        claimed="Backpropagation 5.9 times as fast on MNIST and 18.6 in parsing, on a CPU, at even accuracy.",
        measured="Single entries are never faster than dense here, 0.45 to 0.91 times at 10 % to 0.5 % kept (log, "
        "2026-11-21).",
        code="lancopku/meProp, no licence; the bias gets the whole gradient, as here.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description=(
            "Fraction of a linear layer's output features that is kept, in (0, 1]; 1.0 is dense. The paper: 0.06, "
            "and 0.1 with unified."
        )
    )
    unified: bool = Field(
        False,
        description=(
            "Whether all rows keep the same features: those with the largest sum of magnitudes over the batch."
        ),
    )
    by: Literal["magnitude", "random"] = Field(
        "magnitude",
        description=(
            "magnitude: keep the largest entries or features. random: keep as many random ones, as a control."
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
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Columns if self.unified else Elements

    @property
    def split(self) -> SplitTypes | None:
        return None if self.exact else SplitTypes(self.selection, self.selection)

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "meprop", **self.model_dump(mode="json"), "by": "random"}

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:
        if self.exact:
            return None
        import torch

        score_NO = self._score(seen.grad_NO, site, step)
        if not self.unified:
            kept: Selection = choice.choose_elements(score_NO, self.keep, len(score_NO))
        else:
            # At least float32: a sum of bfloat16 magnitudes stops growing after a few hundred rows.
            wide = torch.promote_types(score_NO.dtype, torch.float32)
            kept = choice.choose_columns(score_NO.sum(0, dtype=wide), self.keep)
        return Split(kept, kept, full_bias=True)

    def _score(self, grad_NO: Tensor, site: Site, step: Step) -> Tensor:
        import torch

        if self.by == "magnitude":
            return grad_NO.abs()
        shape = (1, grad_NO.shape[1]) if self.unified else grad_NO.shape
        return torch.rand(shape, generator=step.generator(site, grad_NO.device), device=grad_NO.device)
