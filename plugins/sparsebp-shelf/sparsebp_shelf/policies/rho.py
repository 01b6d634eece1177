"""Train the examples of a batch whose loss is furthest above that of a reference model.

Sören Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt" (ICML
2022), https://arxiv.org/abs/2206.07137: RHO-LOSS. The reference model is trained on held-out data. Its loss of an
example estimates the irreducible loss, which more training would not remove. The difference of both losses is largest
if a label is right and not learnt yet. Both losses are computed without dropout. We differ: the paper chooses among
images; ours are texts, whose loss is the mean over their targets.

Shape letters: B examples of a batch, K kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import MethodCard, ReferenceReader, Step, choice
from sparsebp_shelf.example import Examples, KeptExamples

if TYPE_CHECKING:
    from torch import Tensor


@final
class Rho(KeptExamples, ReferenceReader):
    """Train the examples whose loss most exceeds that of a reference model."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="If part of the data is noise or already learnt, and you have a reference model, even a smaller one, that "
        "was trained on other data of this kind. The work below leaves out training and running the reference model. "
        "Compare with uniform.",
        year=2022,
        saves=("time", "memory"),
        work="keep + 1 / 3",
        memory="The fraction keep of the examples. With reference_scores: fly, also the reference model.",
        claimed="18 times fewer steps and 2 % more accuracy on web images, Clothing-1M (abstract).",
        code="OATML/RHO-Loss, Apache-2.0; not read.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1, description="Fraction of each batch's examples whose backward runs, in (0, 1]; 1.0 is dense."
    )

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def reads_reference(self) -> bool:
        return True

    def needs_loss(self, step: Step) -> bool:  # noqa: ARG002
        return not self.exact

    def choose(self, examples: Examples, step: Step) -> Tensor | None:  # noqa: ARG002
        if self.exact:
            return None
        assert examples.loss_B is not None
        assert examples.reference_loss_B is not None
        return choice.largest(examples.loss_B - examples.reference_loss_B, self.keep)
