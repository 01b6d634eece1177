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
from typing import TYPE_CHECKING, Literal, final

from pydantic import Field

from sparsebp_cli.policy import EdgeRouter, Step

if TYPE_CHECKING:
    from sparsebp_cli.policy import Edge


@final
class MaxChild(EdgeRouter):
    """Go on into the child with the largest gradient."""

    leaves: Literal["compete", "always"] = Field(
        "compete", description="Whether parameters compete with inputs, or always collect what arrives."
    )
    ties: Literal["first", "all", "random"] = Field(
        "first", description="Which of several equally large children: a residual sum hands the same gradient to both."
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
        if len(rivals) < 2:
            return range(len(edges))
        sizes = self.sizes([edges[i].gradient for i in rivals])
        largest = [i for i, size in zip(rivals, sizes, strict=True) if size == max(sizes)]
        return sorted(leaves + self._break_ties(largest, edges, step))

    def _break_ties(self, largest: list[int], edges: Sequence[Edge], step: Step) -> list[int]:
        if self.ties == "all" or len(largest) == 1:
            return largest
        if self.ties == "first":
            return largest[:1]
        import torch

        drawn = torch.randint(len(largest), (1,), generator=step.generator(edges[0]))
        return [largest[int(drawn)]]
