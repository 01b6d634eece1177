"""At each node of the autograd graph, continue only into the child with the largest gradient.

The method comes from a question in a PyTorch forum, not from a paper: "at node N, compute the gradients of all
children, and continue only into the child with the largest one (L1 norm for tensors)". The replies raised three
questions. (a) If the weight's gradient is largest, does the backward fill only its ``grad`` and compute nothing else?
(b) If the input's gradient is largest, does the last weight get no gradient? With ``leaves: compete`` both answers are
yes. With ``leaves: always``, parameters accumulate every gradient that arrives, and only inputs compete. (c) A
parameter far from the loss may have the largest gradient, which a greedy method never finds. ``lookahead`` counts this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.policies.random_child import ChildRouter
from sparsebp_cli.policy import Edge, MethodCard, Step


@final
class MaxChild(ChildRouter):
    """Continue into the child with the largest gradient."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To study which paths gradients take. It saves nothing: each node computes all gradients before one is "
        "chosen.",
        memory="As dense.",
        measured="Loss after 60 steps: 6.06 to 7.26 with the largest child, 5.15 with a random child, 4.24 if dense; "
        "one seed (results, measurements).",
    )

    ties: Literal["first", "all", "random"] = Field(
        "first",
        description="Where to continue if several children have equally large gradients, as in a residual sum.",
    )

    @property
    def control(self) -> dict[str, object]:
        return {"name": "random-child", "leaves": self.leaves, "missing": self.missing}

    def choose(self, rivals: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        sizes = self.sizes([edges[i].gradient for i in rivals])
        largest = [i for i, size in zip(rivals, sizes, strict=True) if size == max(sizes)]
        if self.ties == "random" and len(largest) > 1:
            return self.draw(largest, edges, step)
        return largest if self.ties == "all" else largest[:1]
