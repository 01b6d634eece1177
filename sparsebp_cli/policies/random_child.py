"""At each node of the autograd graph, continue into one child drawn at random: the control of ``max-child``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from sparsebp_cli.policies.child import ChildRouter
from sparsebp_cli.policy import Edge, Step


@final
class RandomChild(ChildRouter):
    """Continue into one child drawn uniformly."""

    def choose(self, rivals: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        return self.draw(rivals, edges, step)
