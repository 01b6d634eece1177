"""At each node of the autograd graph, go on into one child drawn at random: the control of ``max-child``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, final

from pydantic import Field

from sparsebp_cli.policy import EdgeRouter, Step

if TYPE_CHECKING:
    from sparsebp_cli.policy import Edge


@final
class RandomChild(EdgeRouter):
    """Go on into one child drawn uniformly."""

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
        import torch

        leaves = [i for i, edge in enumerate(edges) if edge.is_leaf] if self.leaves == "always" else []
        rivals = [i for i in range(len(edges)) if i not in leaves]
        if len(rivals) < 2:
            return range(len(edges))
        drawn = torch.randint(len(rivals), (1,), generator=step.generator(edges[0]))
        return sorted([*leaves, rivals[int(drawn)]])
