"""The kind of policy that selects the children of a graph node to which the gradient continues.

A router does not touch autograd. It receives the edges that carry a gradient, and returns the ones that continue.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from pydantic import Field

from sparsebp_cli.policy import choice
from sparsebp_cli.policy.contract import Policy, Step
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import Rule, not_beside, one_process

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Edge:
    """An edge from a node to a child for which the node has computed a gradient.

    Args:
        gradient: The gradient that would continue. It must not be changed.
        is_leaf: Whether the child is a parameter, perhaps behind a cast or a view such as a weight's transpose. A leaf
            accumulates its gradient and has no children.
        name: The parameter's name for a leaf; otherwise a name that is the same in every step.
    """

    gradient: torch.Tensor
    is_leaf: bool
    name: str


class EdgeRouter(Policy):
    """Selects the children to which the gradient continues, inside the backward, at each node of the autograd graph.
    All routers have the three options below. The engine implements the first two."""

    missing: Literal["none", "zero"] = Field(
        "none",
        description="Value of .grad for a trained parameter that no gradient reached. none: None, so optimizers skip "
        "the parameter. zero: zeros, so AdamW still updates it.",
    )
    lookahead: bool = Field(
        False,
        description="true: before each backward, run a dense one, and count how often the policy misses the "
        "parameter with the largest gradient.",
    )
    norm: Literal["l1", "l1_mean", "l2"] = Field(
        "l1", description="Size of a gradient. l1: sum of magnitudes. l1_mean: their mean. l2: Euclidean norm."
    )

    @abstractmethod
    def route(self, edges: Sequence[Edge], step: Step) -> Sequence[int]:
        """Select the edges on which the gradient continues. The engine computes nothing behind the others.

        Args:
            edges: Edges of the node that have a gradient, at least one, in the node's order.
            step: The step of the decision; ``step.generator(edges[0])`` is the only source of randomness allowed.
                ``call`` is the node's number in the graph.

        Returns:
            Indices into ``edges``, each at most once. An empty result stops the gradient at this node.
        """

    @final
    def sizes(self, gradients: Sequence[torch.Tensor]) -> list[float]:
        """Return the sizes of gradients by ``norm``, summed in at least float32. Waits for the device once.

        Args:
            gradients: Gradients of any shapes, at least one.

        Returns:
            Their sizes. A gradient with NaN has an infinite size, so that a router follows it and the error shows.
        """
        import torch

        found = []
        for gradient in gradients:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if self.norm == "l2" and gradient.numel():  # squares of entries below 1e-23 underflow in float32
                scale = choice.find_scale(wide)
                found.append(torch.linalg.vector_norm(wide * scale).double() / scale.double())
            else:
                size = torch.linalg.vector_norm(wide, ord=1).double()
                found.append(size / max(1, gradient.numel()) if self.norm == "l1_mean" else size)
        sizes = torch.stack(found)
        return sizes.nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()


EDGE_ROUTER = Kind(
    EdgeRouter,
    asked="The policy needs `backward.sites: nodes`. Exact only if the backward follows every edge; never unbiased, "
    "because no weights replace the other edges. Only a run shows the FLOPs, by counting.\n",
    suite="sparsebp_cli.testing.router:check_router",
    at_sites=True,
    adapter="sparsebp_cli.backward.node.site:make_adapter",
    keeps_state=False,
    limits=(
        not_beside(
            ("GradientSelector",),
            "Both policies would cut gradients at the same nodes.",
            where="backward",
        ),
        Rule(
            "{policy} decides at nodes of the autograd graph: it needs {sites:nodes}, got {sites:=}",
            options={"sites": ("linears",)},
        ),
        one_process(
            "Each process would follow different edges, and their summed gradient would belong to no decision."
        ),
    ),
)
