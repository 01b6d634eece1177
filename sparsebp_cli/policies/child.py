"""What routers share that go on into one child of each node: whether parameters compete with inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from sparsebp_cli.policy import Edge, EdgeRouter, Step


class ChildRouter(EdgeRouter):
    """A router that chooses among the children that compete; one alone is not asked about."""

    leaves: Literal["compete", "always"] = Field(
        "compete", description="Whether parameters compete with inputs, or always collect what arrives."
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
        """Choose among the children that compete.

        Args:
            rivals: Their numbers, at least two.
            edges: All children.
            step: When.

        Returns:
            The numbers that go on.
        """

    def draw(self, numbers: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        """Return one of the numbers, drawn uniformly."""
        import torch

        return [numbers[int(torch.randint(len(numbers), (1,), generator=step.generator(edges[0])))]]
