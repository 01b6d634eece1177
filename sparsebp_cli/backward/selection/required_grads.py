"""What a backward has to compute when only some parameters are trained, from the graph of the dense pass.

A gradient is needed at a node when some tensor that wants one can be reached from it: a trained parameter, or an input
that the user asked the gradient of. This is read off the edges of the graph that the *dense* forward made, so it does
not depend on what the pass with the policy then did or on which tensors say that they require a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import Node

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.observe.claim import PassEstimate

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.claim import DensePass


def claim_needed(model: nn.Module, dense: DensePass, frozen: Iterable[Tensor]) -> PassEstimate:
    """Return what a backward without the gradients of some parameters needs of a dense one.

    Linears count by product: a wgrad where the weight is trained, a dgrad where something before it is. Any other
    module counts whole where it needs any gradient: attention computes those of queries, keys and values in one. A
    checkpointed layer is computed again where it needs any.

    Args:
        model: That made the pass.
        dense: A pass in which all of them had gradients.
        frozen: Parameters that get none.

    Returns:
        Shares of the backward, and of what is computed again in it, by module.
    """
    graph = _Graph(dense, {id(parameter) for parameter in frozen})
    linears = {name: module for name, module, _ in find_linears(model).covered}
    layers, backward, recomputed = LayerNumbers(model), {}, {}
    for name, flops in dense.flops.backward.items():
        left = float(flops) if name in graph.needing else 0.0
        if name in linears and left:
            is_trained = id(linears[name].weight) in graph.wanted
            left = min(left, dense.flops.forward[name] * float(is_trained + (name in graph.passing)))
        backward[name] = left / flops if flops else 1.0
    again = {layers.part_of(name) for name in graph.needing}
    for name in dense.flops.recomputed:
        recomputed[name] = float(layers.part_of(name) in again)
    return PassEstimate(backward=backward, recomputed=recomputed)


class _Graph:
    """The graph of a pass, by module.

    Args:
        dense: The pass.
        frozen: Tensors that want no gradient, by ``id``.

    Attributes:
        wanted: Tensors that a gradient is wanted of, by ``id``.
        needing: Modules with a node from which one that is wanted can be reached.
        passing: Modules from which one can be reached by an edge to another module's node.
    """

    def __init__(self, dense: DensePass, frozen: set[int]) -> None:
        self.wanted: set[int] = set()
        self.needing: set[str] = set()
        self.passing: set[str] = set()
        reaches: dict[Node, bool] = {}
        for node in _from_the_leaves(dense.loss.grad_fn):
            variable = getattr(node, "variable", None)  # only a node that accumulates has one
            if isinstance(variable, Tensor):
                reaches[node] = id(variable) not in frozen
                if reaches[node]:
                    self.wanted.add(id(variable))
                continue
            module, children = dense.trace.module_of(node), _children(node)
            module = module or ""
            reaches[node] = any(reaches[child] for child in children)
            if not reaches[node]:
                continue
            self.needing.add(module)
            if any(reaches[child] and not _belongs(child, module, dense) for child in children):
                self.passing.add(module)


def _belongs(child: Node, module: str, dense: DensePass) -> bool:
    """Whether a node is the module's own: one that its forward made, or one of its parameters."""
    variable = getattr(child, "variable", None)
    return isinstance(variable, nn.Parameter) or dense.trace.module_of(child) == module


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _from_the_leaves(root: Node | None) -> Iterator[Node]:
    """Every node once, children before those that lead to them."""
    open_nodes, seen = [(root, False)] if root is not None else [], set()
    while open_nodes:
        node, is_done = open_nodes.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            open_nodes.append((node, True))
            open_nodes += [(child, False) for child in _children(node) if child not in seen]
