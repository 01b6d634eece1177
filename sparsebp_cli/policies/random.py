"""Keep a random part of each gradient: the control that every other policy must beat at the same budget.

With ``weighted``, the estimator of Menachem Adelman, Kfir Y. Levy, Ido Hakimi and Mark Silberstein, "Faster Neural
Network Training with Approximate Tensor Operations" (NeurIPS 2021), https://arxiv.org/abs/1805.08079, with uniform
probabilities. We differ: we use one selection, without replacement, for the gradients of both input and weight.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from pydantic import Field

from sparsebp_cli.policies.structured import StructuredSelector
from sparsebp_cli.policy import Blocks, Columns, Elements, MethodCard, Rows, Selection, Site, Step, TwoToFour

if TYPE_CHECKING:
    from torch import Tensor


@final
class Random(StructuredSelector):
    """Keep rows, columns, blocks or elements drawn uniformly."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As a control: every policy should beat it at the same budget.",
        year=2021,
        saves=("time",),
        work="(1 + 2 * keep) / 3",
        memory="As dense.",
        measured="Random rows trained better than rows of largest norm on the text of the Python documentation (log, "
        "2026-11-21), and worse on CMUdict (log, 2026-11-23).",
        code="acsl-technion/approx, BSD-3.",
    )

    weighted: bool = Field(
        False, description="Whether kept parts are multiplied by 1 / probability, which makes the gradient unbiased."
    )

    @property
    def unbiased(self) -> bool:
        return self.weighted or self.exact

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        import torch

        if self.exact:
            return None
        shape = self.score_shape(grad_NO)
        count, device = math.prod(shape), grad_NO.device
        order = torch.randperm(count, generator=step.generator(site, device), device=device)
        # Scores descend along a random permutation, so that largest() draws uniformly without replacement. int32 is
        # wide enough for the number of entries of a gradient.
        score = torch.empty(count, dtype=torch.int32, device=device)
        score[order] = torch.arange(count, 0, -1, dtype=torch.int32, device=device)
        selection = self.choose(score.view(shape), grad_NO, site)
        if not self.weighted:
            return selection
        if isinstance(selection, TwoToFour):
            return replace(selection, weight=2.0)
        assert isinstance(selection, Rows | Columns | Blocks | Elements)
        weight = count / selection.index_K.numel()  # 1 / probability; not 1 / keep, because the kept count is rounded
        if isinstance(selection, Elements):
            return replace(selection, weight=weight)
        dtype = torch.promote_types(grad_NO.dtype, torch.float32)
        weight_K = torch.full(selection.index_K.shape, weight, dtype=dtype, device=device)
        return replace(selection, weight_K=weight_K)
