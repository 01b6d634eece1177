"""At each node of the autograd graph, go on only into the child with the largest gradient.

The rule is a question from a PyTorch forum: "at node N, compute the gradients of all children, and continue only into
the child with the largest one (L1 norm for tensors)". It comes from no paper. What was asked back there, and where it
is answered: (a) is the weight's gradient filled and nothing else computed when the weight's is largest, and (b) is the
last weight left without one when the input's is: ``leaves: compete`` says yes to both, ``always`` lets parameters
collect what arrives and only inputs compete; (c) a parameter far down may have a larger gradient than any near the
loss, and a greedy rule never sees it: ``lookahead`` counts how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

from pydantic import Field

from sparsebp_cli.policies.child import ChildRouter
from sparsebp_cli.policy import Edge, Step


@final
class MaxChild(ChildRouter):
    """Go on into the child with the largest gradient."""

    ties: Literal["first", "all", "random"] = Field(
        "first", description="Which of several equally large children: a residual sum hands the same gradient to both."
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
