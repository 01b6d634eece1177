"""Backpropagate the examples of large loss more often.

Angela H. Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers" (2019),
https://arxiv.org/abs/1910.00762. With ``history`` an example's probability follows the paper: take the last ``history``
losses, with those of its own batch; the fraction of them below the example's loss, to the power of 1 / keep - 1. We
differ: we draw the same number of examples from each batch, without replacement, with these probabilities as weights.
The paper draws each example separately and collects examples until they fill a batch. We replace a fraction of 0 by
half a rank; in the paper's code the smallest probability is an option. Without ``history``, as in Composer, losses are
ranked within the batch. For language models ``scale_factor`` shortens the text of the scoring forward; Composer shrinks
images.

We do not support the paper's pool, which collects examples until a batch is full. The pool needs a random number of
batches, but an example selector can only choose within the batch of one forward. The mean probability is the same as
the paper's: 1 / (beta + 1), which is ``keep``.

Shape letters: B examples of a batch, R losses of the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field, NonNegativeInt

from sparsebp_cli.policy import Measure, MethodCard, Observation, Observed, Stateful, Step
from sparsebp_shelf.example import Examples, ReadExamples, SampledExamples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from sparsebp_cli.policy import State


@final
class SelectiveBackprop(Stateful[object], SampledExamples):
    """Backpropagate examples drawn by the rank of their loss: probability (rank / B) ** (1 / keep - 1)."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="If losses of examples differ widely and labels are right: wrong labels have the largest losses. Compare "
        "with uniform.",
        year=2019,
        saves=("time", "memory"),
        work="keep + scale_factor / 3",
        memory="The fraction keep of the examples.",
        claimed="Reaches the target error up to 3.5 times as fast; convolutional networks on CIFAR-10.",
        code="angelajiang/SelectiveBackprop, Apache-2.0.",
    )

    scale_factor: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description=(
            "Fraction of the token positions, from the start, that the forward for the losses reads, in (0, 1]."
        ),
    )

    history: NonNegativeInt = Field(
        0,
        description=(
            "Number of most recent losses among which SparseBP ranks the loss of an example; the paper: 1024. 0: only "
            "the losses of its batch."
        ),
    )

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def scored_share(self) -> float:
        return self.scale_factor

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({ReadExamples}) if self.history else frozenset()

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, ReadExamples)
        return {} if seen.examples.loss_B is None else {"loss": Measure(seen.examples.loss_B)}

    @property
    def is_identical(self) -> bool:
        return self.history == 0

    def init(self, places: Sequence[object], /) -> State:  # noqa: ARG002
        import torch

        return {"loss_R": torch.full((self.history,), torch.inf)} if self.history else {}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        import torch

        if not self.history:
            return state
        before_R = torch.as_tensor(state["loss_R"])
        read = [loss_B.to(before_R) for loss_B in observation["loss"].values()]
        return {"loss_R": torch.cat([before_R, *read])[-self.history :].clone()}

    def needs_loss(self, step: Step) -> bool:
        return self.is_choosing(step)

    def choose(self, examples: Examples, step: Step) -> Tensor | None:
        import torch

        if not self.is_choosing(step):
            return None
        assert examples.loss_B is not None
        generator, number = step.generator(examples), examples.number
        shuffled = torch.randperm(number, generator=generator)  # breaks ties at random
        loss_B = examples.loss_B.cpu()
        if self.history:
            rank_B = rank(loss_B, torch.as_tensor(step.state["loss_R"]).cpu())
            ascending = torch.arange(number)
        else:
            # Midpoints of the ranks give the smallest loss a nonzero probability; the exponent is Composer's.
            rank_B = (torch.arange(number, dtype=torch.float64) + 0.5) / number
            ascending = shuffled[loss_B[shuffled].argsort(stable=True)]
        chance = rank_B ** (1.0 / self.keep - 1.0)
        # Gumbel top-k: the largest log(chance) + Gumbel noise are a draw without replacement. Logarithms avoid
        # underflow.
        noise = -torch.rand(number, generator=generator, dtype=torch.float64).clamp(min=1e-300).log()
        drawn = (chance.log() - noise.log()).topk(self.count_chosen(number)).indices
        return ascending[drawn].sort().values


def rank(loss_B: Tensor, before_R: Tensor) -> Tensor:
    """Return the fraction of a window's losses below each loss of a batch; half a place replaces a fraction of 0.

    Args:
        loss_B: Losses of the batch's examples; NaN counts as above all others.
        before_R: The window before it, the latest last, inf for missing losses. The batch replaces the earliest losses;
            only the last R losses of a longer batch count.

    Returns:
        (B,), float64, in (0, 1].
    """
    import torch

    loss_B = loss_B.nan_to_num(torch.inf, torch.inf)
    window = torch.cat([before_R.to(loss_B), loss_B])[-len(before_R) :]
    window = window[window.isfinite()]
    below_B = (window < loss_B[:, None]).sum(1).double()
    return below_B.clamp(min=0.5) / max(1, len(window))
