"""Keep moving averages of the losses that each training example had at its visits.

After Ziheng Cheng, Zhong Li and Jiang Bian (2025), https://arxiv.org/abs/2509.23461. Shape letters: N examples of the
training data, K visited ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sparsebp_cli.policy import Measure, Observation, Observed, Policy, ReadExamples, Stateful, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from sparsebp_cli.policy import State


class LossAverages(Stateful[int], Policy):
    """A policy that keeps an average of each example's losses, at first 1 / N. A visit with the loss l sets the weight
    to beta1 * average + (1 - beta1) * l, then the average to beta2 * average + (1 - beta2) * l."""

    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2,
        description=(
            "Weight of an example's average of earlier losses, in [0, 1), when examples are drawn. Its current loss "
            "has the rest. 0: only the current loss."
        ),
    )
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.9,
        description=(
            "Weight of the old average, in [0, 1), when a loss is added to an example's average. The loss has the rest."
        ),
    )

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ReadExamples})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, ReadExamples)
        read = seen.examples
        if read.loss_B is None or read.row_B is None:
            return {}
        return {"loss": Measure(read.loss_B), "row": Measure(read.row_B)}

    def init(self, places: Sequence[int], /) -> State:
        import torch

        return {"average_N": torch.full((len(places),), 1.0 / max(1, len(places)))}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        average_N = averages_of(state).clone()
        for row_K, loss_K in visits_of(observation):
            average_N[row_K] = self.beta2 * average_N[row_K] + (1.0 - self.beta2) * loss_K.to(average_N)
        return {"average_N": average_N}

    def weigh(self, average_K: Tensor, loss_K: Tensor) -> Tensor:
        """Return the weights of examples, from their averages before a visit and their losses at it."""
        return self.beta1 * average_K + (1.0 - self.beta1) * loss_K


def averages_of(state: State) -> Tensor:
    """Return the averages in a state, (N,)."""
    import torch

    return torch.as_tensor(state["average_N"])


def visits_of(observation: Observation) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows and the losses of the examples of each batch."""
    for batch, loss_K in observation["loss"].items():
        yield observation["row"][batch], loss_K
