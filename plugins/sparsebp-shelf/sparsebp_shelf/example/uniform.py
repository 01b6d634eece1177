"""Backpropagate examples drawn uniformly: a control for every example selector at the same budget.

It draws minibatches without replacement, like the baseline of Angela H. Jiang et al., "Accelerating Deep Learning by
Focusing on the Biggest Losers" (2019), https://arxiv.org/abs/1910.00762. We differ: as a control, it follows the
schedule of the policy that you compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.example.examples import Examples
from sparsebp_shelf.example.sampled import SampledExamples

if TYPE_CHECKING:
    from torch import Tensor


@final
class Uniform(SampledExamples):
    """Backpropagate random examples, without any scoring."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As a control for policies that choose examples. It is the same as a smaller batch.",
        year=2019,
        saves=("time", "memory"),
        work="keep",
        memory="The fraction keep of the examples.",
    )

    @property
    def unbiased(self) -> bool:
        return self.exact  # with unequal numbers of targets, the mean over targets is biased

    @property
    @override
    def control(self) -> None:
        return None

    @property
    @override
    def fits_head(self) -> bool:
        return True

    @override
    def needs_loss(self, step: Step) -> bool:
        return False

    def choose(self, examples: Examples, step: Step) -> Tensor | None:
        import torch

        if not self.is_choosing(step):
            return None
        order = torch.randperm(examples.number, generator=step.generator(examples))
        return order[: self.count_chosen(examples.number)].sort().values
