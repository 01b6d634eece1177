"""Keep a random projection of the features of each linear's input for the gradient of its weight.

Yara Shamshoum, Nitzan Hodos, Yuval Sieradzki and Assaf Schuster, "CompAct: Compressed Activations for Memory-Efficient
LLM Training" (NAACL 2025), https://arxiv.org/abs/2410.15352, after its abstract and formulas. ``interval: 50`` with
``training.optim: compact`` is their method: the matrix P stays for 50 steps, Adam keeps moments of the small gradient
``dy^T x P``, and the weight moves by Adam's step times P^T. We differ: the optimizer gets the gradient projected back
to the size of the weight. ``update: eager`` frees it at once. Without both options, each forward draws a new matrix,
and any optimizer keeps moments of the whole gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field, PositiveInt

from sparsebp_cli.policy import MethodCard, Site, Step, choice
from sparsebp_shelf.saver import InputSaver, SavedProjection

if TYPE_CHECKING:
    from torch import Tensor


@final
class CompAct(InputSaver):
    """Project the features of an input randomly onto fewer, and back in the backward; unbiased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To compare with wta-crs. For all data, the mean squared error of compact's gradient is about 1 / keep "
        "times the squared norm of the dense one. The error of wta-crs, which keeps rows, is smaller if rows differ in "
        "norm.",
        year=2025,
        saves=("memory",),
        work="(2 + keep * (1 + D / N + D / O)) / 3",
        memory="keep * N * D entries of each input. With interval and optim: compact, also 2 * keep * O * D moments.",
        claimed="25 to 30 % less peak memory in pretraining, 50 % less in fine-tuning; LLaMA and RoBERTa (abstract).",
        code="Not read.",
    )

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("entries", "gaussian"),)

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.25,
        description=(
            "Number of features after the projection, as a fraction of the input's features, in (0, 1]; 1.0 is dense."
        ),
    )
    interval: PositiveInt | None = Field(
        None,
        description=(
            "Number of steps for which a linear layer keeps its projection matrix. 'training.optim: compact' needs "
            "this; the paper: 50. null: each forward draws a new matrix."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def form(self) -> type[SavedProjection] | None:
        return None if self.exact else SavedProjection

    @property
    def draws_for(self) -> int | None:
        return None if self.exact else self.interval

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedProjection | None:
        if self.exact:
            return None
        num_kept = choice.count_kept(self.keep, x_ND.shape[1])
        if self.interval is not None:
            step = Step(step.index // self.interval, seed=step.seed, draw=step.draw)
        return SavedProjection.of(x_ND, num_kept, step.generator(site, x_ND.device))

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedProjection.count_bytes(choice.count_kept(self.keep, num_features), num_rows, itemsize)
