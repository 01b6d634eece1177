"""Keep N of every M neighbouring entries of a linear's gradient, drawn with the least variance without bias.

Brian Chmiel, Itay Hubara, Ron Banner and Daniel Soudry, "Minimum Variance Unbiased N:M Sparsity for the Neural
Gradients" (ICLR 2023), https://arxiv.org/abs/2203.10991. In each group the probabilities are in proportion to the
magnitudes. Probabilities above 1 are cut to 1 and the others raised. A kept entry is divided by its probability. As in
the paper, groups lie along the dimension that the product sums over: rows for the weight gradient, features for the
input gradient. We differ: they give closed forms for 1:2 and 2:4; we use systematic sampling for any N:M, with the same
probability and variance of each entry. The bias gets the whole gradient.

The torch function that Yuezhou Hu and others published with "S-STE" (NeurIPS 2024), https://arxiv.org/abs/2409.09099,
is biased if one entry outweighs the other three: (0.1, 0.2, 0.3, 4) has the mean (0.38, 0.77, 1.15, 2.30). Our policy
always keeps the 4.

Cost: SparseBP multiplies densely, and the choice sorts every group. Sparse tensor cores would multiply 2:4 at up to
twice the rate. SparseBP has no such kernel, so this policy only shows how the variance affects a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self, final

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.policy import (
    Budget,
    Groups,
    InformedSelector,
    MethodCard,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Step,
)
from sparsebp_shelf.policies.group_sampling import draw_groups, fill_groups

if TYPE_CHECKING:
    from torch import Generator, Tensor


@final
class MVUE(InformedSelector):
    """Draw N of every M neighbouring gradient entries by magnitude, unbiased and with the least variance."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To learn how the noise of N:M gradients affects a training, before you buy a GPU with sparse tensor "
        "cores. SparseBP computes it more slowly than dense.",
        year=2023,
        work="1",
        memory="As dense.",
        claimed="1:2 and 2:4 gradients train as accurately as dense gradients; ResNets, BERT and a translation model.",
        code="Only a README. The later PyTorch code in S-STE's repository, BSD-3, is biased if one entry dominates.",
    )

    kept: PositiveInt = Field(2, description="N of N:M sparsity: the number of entries that each group keeps.")
    group: PositiveInt = Field(4, description="M of N:M sparsity: the number of neighbouring entries in a group.")
    products: Literal["wgrad", "dgrad", "both"] = Field(
        "wgrad",
        description=(
            "Which product is approximated. wgrad: the gradient of the weight, in groups of rows. dgrad: the "
            "gradient of the input, in groups of features. both: both products. Errors of dgrad pass on to the "
            "layers below."
        ),
    )
    by: Literal["magnitude", "random"] = Field(
        "magnitude",
        description=(
            "Probabilities of the draw. magnitude: in proportion to the magnitudes of the entries. random: all "
            "equal, as a control."
        ),
    )

    @model_validator(mode="after")
    def _is_a_part(self) -> Self:
        if self.kept > self.group:
            raise ValueError(f"kept must be at most the option group, got kept {self.kept} and group {self.group}")
        return self

    @property
    def exact(self) -> bool:
        return self.kept == self.group

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> Budget:
        share = self.kept / self.group
        return Budget(share if self.products != "wgrad" else 1.0, share if self.products != "dgrad" else 1.0)

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Groups

    @property
    def split(self) -> SplitTypes | None:
        if self.exact:
            return None
        return SplitTypes(*(Groups if self.products in (product, "both") else None for product in ("dgrad", "wgrad")))

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "mvue", **self.model_dump(mode="json"), "by": "random"}

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:
        if self.exact:
            return None
        generator = step.generator(site, seen.grad_NO.device)
        dgrad = wgrad = None
        if seen.needs_wgrad and self.products != "dgrad":
            wgrad = self._draw(seen.grad_NO.t(), generator)
            wgrad = Groups(wgrad.weight_NO.t(), wgrad.num_of, along_rows=True)
        if seen.needs_dgrad and self.products != "wgrad":
            dgrad = self._draw(seen.grad_NO, generator)
        return Split(dgrad, wgrad, full_bias=True)

    def _draw(self, grad: Tensor, generator: Generator) -> Groups:
        """Draw in groups of neighbours in a row."""
        import torch

        weight = torch.ones(grad.shape, device=grad.device)
        whole = grad.shape[1] // self.group * self.group
        for start, end, size in ((0, whole, self.group), (whole, grad.shape[1], grad.shape[1] - whole)):
            if end == start or size <= self.kept:
                continue  # a short last group is kept whole
            score_GM = grad[:, start:end].reshape(-1, size).abs()
            if self.by == "random":
                score_GM = torch.ones_like(score_GM)
            probability_GM = fill_groups(score_GM, self.kept)
            drawn_GM = draw_groups(probability_GM, self.kept, generator)
            weight_GM = torch.where(drawn_GM, probability_GM.reciprocal(), 0.0).float()
            weight[:, start:end] = weight_GM.view(len(grad), end - start)
        return Groups(weight, (self.kept, self.group))
