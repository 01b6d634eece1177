"""The kind of policy that says to which children of a graph node the gradient goes on.

Nothing of autograd is needed for it: a router is shown the edges that carry a gradient, and names those that go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from pydantic import Field

from sparsebp_cli.policy import choice
from sparsebp_cli.policy.contract import Policy, Step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Edge:
    """One way on from a node: a child for which the node has computed a gradient.

    Args:
        gradient: What would go on. Must not be changed.
        is_leaf: Whether the child is a parameter, also behind views of it, such as the transpose of a weight, or a
            cast; a leaf collects its gradient and leads nowhere.
        name: The parameter's name for a leaf; else a name that is the same in every step.
    """

    gradient: torch.Tensor
    is_leaf: bool
    name: str


class EdgeRouter(Policy):
    """Answers: to which children of this graph node does the gradient go on? Asked inside the backward, at each node.

    The three options below are every router's; the engine carries the first two out.
    """

    missing: Literal["none", "zero"] = Field(
        "none", description="The grad of a trained parameter that nothing reached: AdamW moves zero, but not none."
    )
    lookahead: bool = Field(
        False, description="Before each backward run a full one, and count the choices that lead away from its largest."
    )
    norm: Literal["l1", "l1_mean", "l2"] = Field(
        "l1", description="Size of a gradient: sum of magnitudes, their mean over the entries, or Euclidean norm."
    )

    @abstractmethod
    def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
        """Choose the edges that go on. What lies behind the others is not computed.

        Args:
            edges: At least one, in the node's own order.
            step: When; ``step.generator(edges[0])`` is the only source of randomness allowed. ``call`` is the node's
                number in the graph.

        Returns:
            Numbers of edges, each at most once; none ends the way here.
        """

    @final
    def sizes(self, gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return how large gradients are by ``norm``, summed in at least float32; waits for the device once.

        Args:
            gradients: At least one.

        Returns:
            Their sizes; infinite where an entry is not a number, so that it is found and not avoided.
        """
        import torch

        found = []
        for gradient in gradients:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if self.norm == "l2" and gradient.numel():  # an entry below 1e-23 has no square in float32
                scale = choice.find_scale(wide)
                found.append(torch.linalg.vector_norm(wide * scale).double() / scale.double())
            else:
                size = torch.linalg.vector_norm(wide, ord=1).double()
                found.append(size / max(1, gradient.numel()) if self.norm == "l1_mean" else size)
        sizes = torch.stack(found)
        return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()
