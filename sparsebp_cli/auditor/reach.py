"""Which leaves every node of a graph leads to: a gradient is worth computing only on the way to one that is used.

A set of leaves is a whole number, one bit a leaf. Bit 0 stands for whatever is not known, and counts as used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sparsebp_cli.backward.observe.graph import LEAF

UNKNOWN = 1  # the bit of what nobody can judge


@dataclass
class LeafReachability:
    """The graph of one backward pass.

    Args:
        leaves: Of each node, by its sequence number.
        edges: Of each node, the sets of its edges in their order; 0 for an edge that leads nowhere.
        functions: Nodes of Functions written in Python.
        variables: Every leaf.
    """

    leaves: dict[int, int] = field(default_factory=dict)
    edges: dict[int, tuple[int, ...]] = field(default_factory=dict)
    functions: list[Any] = field(default_factory=list)
    variables: list[Tensor] = field(default_factory=list)

    def behind(self, number: int, own: int) -> int:
        """Return the leaves that the gradient of a product's input leads to.

        Args:
            number: The node's.
            own: Bits of the parameters that the product's module reads itself: weight and bias.

        Returns:
            A set of leaves: without the edges to its own parameters, where there is another.
        """
        others = [edge for edge in self.edges.get(number, ()) if edge & ~own]
        if not others:
            return self.leaves.get(number, UNKNOWN)
        found = 0
        for edge in others:
            found |= edge
        return found


def walk(roots: Sequence[Tensor], bit_of: Callable[[Tensor], int]) -> LeafReachability:
    """Go through the graph below some tensors.

    Args:
        roots: What is differentiated.
        bit_of: Of a leaf.

    Returns:
        The graph.
    """
    reach, found, order = LeafReachability(), dict[Any, int](), list[Any]()
    waiting = [(root.grad_fn, False) for root in roots if root.grad_fn is not None]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in found:
            found[node] = 0
            waiting.append((node, True))
            waiting += [(child, False) for child, _ in node.next_functions if child is not None and child not in found]
    for node in order:  # children before their parents
        if node.name() == LEAF:
            found[node] = bit_of(node.variable)
            reach.variables.append(node.variable)
            continue
        edges = tuple(0 if child is None else found[child] for child, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            reach.functions.append(node)
        hides = not any(edges)  # what leads to nothing visible may well do something of its own
        for edge in edges:
            found[node] |= edge
        found[node] |= UNKNOWN if hides else 0
        number = node._sequence_nr()  # noqa: SLF001 - as Attribution does
        reach.leaves[number], reach.edges[number] = found[node], edges
    return reach
