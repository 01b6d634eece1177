"""Train the examples of a batch whose gradients agree most with validation gradients, and least with each other.

Jiachen T. Wang, Tong Wu, Dawn Song, Prateek Mittal, Ruoxi Jia, "GREATS: Online Selection of High-Quality Data for LLM
Training in Every Iteration" (NeurIPS 2024), https://openreview.net/forum?id=232VcN8tSx. An SGD step on some examples
lowers the validation loss by the sum of a = eta <g_i, g_val>, less a second-order term of H = eta^2 <g_i, g_j>, with
the identity for the Hessian. The policy adds examples greedily, the largest a first, and lowers a by the row of H of
each added example. We differ: the gradients belong to mean losses without dropout, and the validation examples come
from a part of the training data. For each linear we use the cheaper of two exact forms of the products.

Shape letters: B examples of a batch, K kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from pydantic import Field, PositiveInt
from typing_extensions import override

from sparsebp_cli.policy import Examples, MethodCard, Step
from sparsebp_shelf.example import KeptExamples

if TYPE_CHECKING:
    from torch import Tensor


@final
class Greats(KeptExamples):
    """Train the examples whose gradient descent step would lower the validation loss most."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To see how much better a step on chosen examples can be: choosing costs more than a step saves, so it is "
        "no way to save time. Not in the work: the validation examples, and the products of gradients. Compare with "
        "uniform.",
        year=2024,
        saves=("steps",),
        work="keep + 2 / 3",
        memory="keep of the examples in the step; the scoring pass keeps inputs of linears and gradients of their "
        "outputs for all examples and the validation's.",
        claimed="Faster convergence and better generalisation, training of large language models (abstract).",
        code="Jiachen-T-Wang/GREATS; a licence in its torchtune part alone; it runs the whole batch a second time.",
    )

    validation_batch_size: PositiveInt = Field(
        4,
        description=(
            "Number of validation examples, drawn anew for each batch. Their mean gradient is compared with the "
            "training examples' gradients."
        ),
    )

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    @override
    def num_validation(self) -> int:
        return 0 if self.exact else self.validation_batch_size

    def needs_loss(self, step: Step) -> bool:  # noqa: ARG002
        return not self.exact

    def choose(self, examples: Examples, step: Step) -> Tensor | None:  # noqa: ARG002
        if self.exact:
            return None
        assert examples.product_B is not None
        assert examples.product_BB is not None
        assert examples.learning_rate is not None
        num_kept = self.count_chosen(examples.number)
        rate, product_B, product_BB = examples.learning_rate, examples.product_B.cpu(), examples.product_BB.cpu()
        # a and H are divided by eta, which keeps the order and also works at a rate of 0.
        return select_greedily(product_B, rate * product_BB, num_kept).sort().values


def select_greedily(gain_B: Tensor, curvature_BB: Tensor, num_kept: int) -> Tensor:
    """Return K examples, int64, in the order in which they are added: the largest gain first. Each added example lowers
    the gains by its row of the second-order term."""
    import torch

    left_B, chosen = gain_B.double(), list[int]()
    for _ in range(num_kept):
        best = int(left_B.argmax())
        chosen.append(best)
        left_B = left_B - curvature_BB[best]
        left_B[best] = -torch.inf
    return torch.tensor(chosen)
