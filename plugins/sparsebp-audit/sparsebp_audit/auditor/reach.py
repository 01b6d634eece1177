"""Find the leaves to which every node of a graph leads: a gradient is useful only on the way to a used one.

A set of leaves is an integer with one bit per leaf. Bit 0 represents unknown leaves, and counts as used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from sparsebp_cli.backward.observe.graph import LEAF
from sparsebp_cli.backward.observe.internals import sequence_number_of, variable_of

UNKNOWN = 1  # bit of leaves that cannot be judged


@dataclass
class LeafReachability:
    """The graph of one backward pass."""

    leaves: dict[int, int] = field(default_factory=dict)  # of each node, by sequence number
    edges: dict[int, tuple[int, ...]] = field(default_factory=dict)  # leaves of each edge of a node; 0: leads nowhere
    functions: list[Node] = field(default_factory=list)  # nodes of Python Functions
    variables: list[Tensor] = field(default_factory=list)  # all leaves

    def behind(self, number: int, own: int) -> int:
        """Return the leaves to which the gradient of a product's input leads. ``own`` has the bits of the weight and
        bias that the module itself reads; their edges do not count if there are others."""
        others = [edge for edge in self.edges.get(number, ()) if edge & ~own]
        if not others:
            return self.leaves.get(number, UNKNOWN)
        found = 0
        for edge in others:
            found |= edge
        return found


def walk(roots: Sequence[Tensor], bit_of: Callable[[Tensor], int]) -> LeafReachability:
    """Read the graph below some tensors; ``bit_of`` returns the bit of a leaf."""
    reach, found, order = LeafReachability(), dict[Node, int](), list[Node]()
    waiting = [(root.grad_fn, False) for root in roots if root.grad_fn is not None]
    # An explicit stack, because graphs exceed Python's recursion limit.
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
            leaf = variable_of(node)
            found[node] = bit_of(leaf)
            reach.variables.append(leaf)
            continue
        edges = tuple(0 if child is None else found[child] for child, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            reach.functions.append(node)
        hides = not any(edges)  # a node without visible leaves may have other effects
        for edge in edges:
            found[node] |= edge
        found[node] |= UNKNOWN if hides else 0
        number = sequence_number_of(node)
        reach.leaves[number], reach.edges[number] = found[node], edges
    return reach
