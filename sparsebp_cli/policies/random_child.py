"""At each node of the autograd graph, continue into one child drawn at random: the control of ``max-child``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policy import Edge, EdgeRouter, MethodCard, Step


class ChildRouter(EdgeRouter):
    """A router that selects among competing children. It always continues into an only child."""

    leaves: Literal["compete", "always"] = Field(
        "compete", description="Whether parameters compete with inputs, or always accumulate the gradient that arrives."
    )

    @property
    def exact(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
        leaves = [i for i, edge in enumerate(edges) if edge.is_leaf] if self.leaves == "always" else []
        rivals = [i for i in range(len(edges)) if i not in leaves]
        return sorted(leaves + (rivals if len(rivals) < 2 else self.choose(rivals, edges, step)))

    @abstractmethod
    def choose(self, rivals: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        """Return the indices of the children that continue, out of at least two rivals."""

    def draw(self, numbers: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        """Return one of the indices, drawn uniformly."""
        import torch

        return [numbers[int(torch.randint(len(numbers), (1,), generator=step.generator(edges[0])))]]


@final
class RandomChild(ChildRouter):
    """Continue into one child drawn uniformly."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="As the control of max-child.",
        memory="As dense.",
    )

    def choose(self, rivals: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        return self.draw(rivals, edges, step)
