"""Draw the examples of a batch by two moving averages of each example's loss, kept over the epochs.

Ziheng Cheng, Zhong Li and Jiang Bian, "Data-Efficient Training by Evolved Sampling" (2025),
https://arxiv.org/abs/2509.23461. It follows the abstract; the recursions and their constants are not from the paper. An
example has an average s of its losses, at first 1 / N. A forward over the batch gives the loss l of each example. The
example's weight becomes w = beta1 s + (1 - beta1) l, then s becomes beta2 s + (1 - beta2) l. Because s is the slower
average, w is the average plus a fraction of the loss's distance to it. We differ: examples are drawn without
replacement in proportion to w, with the probabilities of :func:`~sparsebp_cli.policy.sampling.water_fill`. With
``weighted`` each loss is multiplied by 1 / probability. Epochs are whole: ``evolved-pruning`` does ESWP's pruning, and
one training refuses both policies together.

Shape letters: B examples of a batch, K drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from pydantic import Field
from typing_extensions import override

from sparsebp_cli.policy import Examples, MethodCard, Step
from sparsebp_shelf.example import KeptExamples, WeightedExamples
from sparsebp_shelf.policies.loss_average import LossAverages, averages_of

if TYPE_CHECKING:
    from torch import Tensor


@final
class EvolvedSampling(LossAverages, KeptExamples):
    """Draw examples in proportion to a moving average of their losses, from visit to visit."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For several epochs: in the first one it draws in proportion to the loss. Each example of the data must "
        "be known by its row, so it needs a recipe, or a loop that gives the rows. Compare with uniform.",
        year=2025,
        saves=("time", "memory"),
        work="keep + 1 / 3",
        memory="keep of the examples; 4 bytes for each of the training data.",
        claimed="Up to 45 % less time without loss, pre-training and fine-tuning (abstract, ESWP included).",
    )

    weighted: bool = Field(
        False,
        description=(
            "Whether the loss of each example is multiplied by 1 / probability. The mean of the gradient is then "
            "the gradient of the whole batch."
        ),
    )

    @property
    def unbiased(self) -> bool:
        return self.exact or self.weighted

    @property
    @override
    def weighs(self) -> bool:
        return self.weighted and not self.exact

    @property
    @override
    def reads_rows(self) -> bool:
        return not self.exact

    def needs_loss(self, step: Step) -> bool:  # noqa: ARG002
        return not self.exact

    def choose(self, examples: Examples, step: Step) -> Tensor | WeightedExamples | None:
        if self.exact:
            return None
        assert examples.loss_B is not None
        assert examples.row_B is not None
        average_B = averages_of(step.state).to(examples.loss_B.device)[examples.row_B]
        index_K, weight_K = self.draw(self.weigh(average_B, examples.loss_B), examples, step)
        return WeightedExamples(index_K, weight_K) if self.weighted else index_K
