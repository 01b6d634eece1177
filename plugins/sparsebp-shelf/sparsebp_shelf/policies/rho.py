"""Train the examples of a batch whose loss is furthest above that of a reference model.

Sören Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt" (ICML
2022), https://arxiv.org/abs/2206.07137: RHO-LOSS. The reference is trained on held-out data. Its loss of an example is
the irreducible loss, which training on other data would not remove. The difference is largest if a label is right and
not learnt yet. Both losses are computed without dropout. We differ: the paper chooses among images; ours are texts,
whose loss is the mean over their targets.

Shape letters: B examples of a batch, K kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from sparsebp_cli.policy import Examples, MethodCard, ReferenceReader, Step, choice
from sparsebp_shelf.example import KeptExamples

if TYPE_CHECKING:
    from torch import Tensor


@final
class Rho(KeptExamples, ReferenceReader):
    """Train the examples whose loss most exceeds that of a reference model."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="Where part of the data is noise or known already, and a model trained on other data of the kind is at "
        "hand, which may be smaller. Not in the work: its training, and its forward, once for each example of the "
        "data or for each batch. Compare with uniform.",
        year=2022,
        saves=("time", "memory"),
        work="keep + 1 / 3",
        memory="keep of the examples; with reference_scores: fly the reference.",
        claimed="18 times fewer steps and 2 % more accuracy on images from the web, Clothing-1M (abstract).",
        code="OATML/RHO-Loss, Apache-2.0; not read.",
    )

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1, description="Fraction of each batch's examples that is backpropagated, in (0, 1]; 1.0 is dense."
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
