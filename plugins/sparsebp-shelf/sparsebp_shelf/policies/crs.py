"""Multiply a random part of each backward product, chosen by the norms of both factors.

It draws rows for the weight gradient and output features for the input gradient. Menachem Adelman, Kfir Y. Levy, Ido
Hakimi and Mark Silberstein, "Faster Neural Network Training with Approximate Tensor Operations" (NeurIPS 2021),
https://arxiv.org/abs/1805.08079. We differ: they also approximate the forward. Their column-row sampling draws with
replacement; ``draw: fixed`` draws the same number without replacement, with about half of the variance. It cuts
probabilities above 1 and raises the others. ``draw: bernoulli`` is theirs; it keeps a random number of rows, for which
the CPU waits for the GPU. We do not support their biased ``top_k``, which has no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import (
    Budget,
    Columns,
    InformedSelector,
    MethodCard,
    Reading,
    Rows,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Step,
    choice,
)
from sparsebp_shelf import sampling

if TYPE_CHECKING:
    from torch import Generator, Tensor


@final
class CRS(InformedSelector):
    """Draw rows and features of large products, weighted so that gradients stay unbiased; bias gradients are dense."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For wide linear layers and many rows, if the gradient must be unbiased. Not for narrow layers: "
        "choosing costs in proportion to N (D + O).",
        year=2021,
        saves=("time",),
        work="(2 + keep) / 3",
        memory="As dense.",
        claimed="Up to 66 % fewer FLOPs and training up to 1.37 times as fast, with ResNets on ImageNet.",
        measured="With 735 tokens per step, a step took 1.02 times as long as dense: computing norms and gathering "
        "rows cost as much time as the products save (log, 2026-11-23).",
        code="acsl-technion/approx, BSD-3; draws with replacement, or each row separately.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        description="Fraction of the rows or features that is multiplied, in (0, 1]; 1.0 is dense."
    )
    products: Literal["wgrad", "dgrad", "both"] = Field(
        "wgrad",
        description=(
            "Which product is approximated. wgrad: the gradient of the weight, from some rows. dgrad: the gradient "
            "of the input, from some features. both: both products. Errors of dgrad pass on to the layers below."
        ),
    )
    by: Literal["leverage", "uniform"] = Field(
        "leverage",
        description=(
            "Probabilities of the draw. leverage: in proportion to the product of the norms of both factors. "
            "uniform: all equal, as a control."
        ),
    )
    draw: Literal["fixed", "bernoulli"] = Field(
        "fixed",
        description=(
            "fixed: keep a fixed number of rows or features. bernoulli: decide about each one separately, so that "
            "the number is random."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> Budget:
        dgrad, wgrad = (self.keep if self._approximates(product) else 1.0 for product in ("dgrad", "wgrad"))
        return Budget(dgrad, wgrad, is_mean=self.draw == "bernoulli")

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.exact else Rows if self._approximates("wgrad") else Columns

    @property
    def split(self) -> SplitTypes | None:
        if self.exact:
            return None
        return SplitTypes(
            Columns if self._approximates("dgrad") else None, Rows if self._approximates("wgrad") else None
        )

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "uniform":
            return None
        return {"name": "crs", **self.model_dump(mode="json"), "by": "uniform"}

    @property
    def reads(self) -> frozenset[Reading]:
        if self.exact or self.by == "uniform":
            return frozenset()
        names: dict[str, Reading] = {"wgrad": "input_norm", "dgrad": "weight_norm"}
        return frozenset(name for product, name in names.items() if self._approximates(product))

    def choose(self, seen: Seen, site: Site, step: Step) -> Split | None:
        if self.exact:
            return None
        grad_NO, dgrad, wgrad = seen.grad_NO, None, None
        generator = step.generator(site, grad_NO.device)
        if seen.needs_wgrad and self._approximates("wgrad"):
            rows = self._score(grad_NO, 1, "input_norm", seen)
            wgrad = Rows(*self._draw(rows, generator))
        if seen.needs_dgrad and self._approximates("dgrad"):
            features = self._score(grad_NO, 0, "weight_norm", seen)
            dgrad = Columns(*self._draw(features, generator))
        return Split(dgrad, wgrad, full_bias=True)

    def _approximates(self, product: str) -> bool:
        return self.products in (product, "both")

    def _score(self, grad_NO: Tensor, dim: int, reading: Reading, seen: Seen) -> Tensor:
        if self.by == "uniform":
            return grad_NO.new_ones(grad_NO.shape[1 - dim])
        # In float64 the product of two norms does not underflow.
        return choice.norm(grad_NO, dim).double() * seen.readings[reading].double()

    def _draw(self, score: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return the kept indices and their weights."""
        num_kept = choice.count_kept(self.keep, len(score))
        probability = sampling.water_fill(score, num_kept)
        if self.draw == "fixed":
            index_K = sampling.draw(probability, num_kept, generator)
        else:
            index_K = sampling.draw_independently(probability, generator)
        return index_K, sampling.weigh(probability, index_K)
