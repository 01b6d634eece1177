"""Estimates which gradients a backward still requires if only some parameters are trained.

A node requires a gradient if it leads to a trained parameter, or to an input whose gradient the user requested. The
estimate reads the graph of the *dense* forward. So it depends neither on the pass with the policy nor on which tensors
require a gradient at the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import Node

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.observe.flops import PassEstimate
from sparsebp_cli.backward.observe.internals import sequence_number_of

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.flops import DensePass


def claim_needed(
    model: nn.Module, dense: DensePass, frozen: Iterable[Tensor], cut: Collection[str] = ()
) -> PassEstimate:
    """Return the remaining fractions of a dense pass without the gradients of the ``frozen`` parameters, and without
    the backward of the modules named in ``cut``.

    Linears count by product: wgrad if the weight is trained, dgrad if an earlier parameter is trained. Other modules
    count whole if they require any gradient, since attention computes the gradients of queries, keys and values
    together. A checkpointed layer is recomputed if it requires any gradient. With ``cut``, it is recomputed only up to
    its last module that requires one.
    """
    graph = _Graph(dense, {id(parameter) for parameter in frozen}, frozenset(cut))
    linears = {name: module for name, module, _ in find_linears(model).covered}
    layers, backward, recomputed = LayerNumbers(model), {}, {}
    for name, flops in dense.flops.backward.items():
        left = float(flops) if name in graph.needing else 0.0
        if name in linears and left:
            is_trained = id(linears[name].weight) in graph.wanted
            left = min(left, dense.flops.forward[name] * float(is_trained + (name in graph.passing)))
        backward[name] = left / flops if flops else 1.0
    ends: dict[str, int] = {}
    for name in graph.needing:
        part = layers.part_of(name)
        if not cut or name != part:  # the layer's own additions to the residual stream save nothing for backward
            ends[part] = max(graph.ends[name], ends.get(part, 0))
    for name in dense.flops.recomputed:
        start = graph.starts.get(name, 0) if cut else 0
        recomputed[name] = float(start <= ends.get(layers.part_of(name), -1))
    return PassEstimate(backward=backward, recomputed=recomputed)


class _Graph:
    """The graph of a pass, by module."""

    def __init__(self, dense: DensePass, frozen: set[int], cut: frozenset[str]) -> None:
        self.wanted: set[int] = set()  # tensors whose gradient is required, by id
        self.needing: set[str] = set()  # modules with a node that leads to a wanted tensor
        self.passing: set[str] = set()  # modules that lead to a wanted tensor through another module's node
        # Autograd's sequence numbers of each module's first node, and of its last node that leads to a wanted tensor.
        self.starts: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        reaches: dict[Node, bool] = {}
        for node in _from_the_leaves(dense.loss.grad_fn):
            variable = getattr(node, "variable", None)  # only nodes that accumulate a gradient have this attribute
            if isinstance(variable, Tensor):
                reaches[node] = id(variable) not in frozen
                if reaches[node]:
                    self.wanted.add(id(variable))
                continue
            module, children = dense.trace.module_of(node), _children(node)
            module, number = module or "", sequence_number_of(node)
            self.starts[module] = min(number, self.starts.get(module, number))
            reaches[node] = module not in cut and any(reaches[child] for child in children)
            if not reaches[node]:
                continue
            self.needing.add(module)
            self.ends[module] = max(number, self.ends.get(module, number))
            if any(reaches[child] and not _belongs(child, module, dense) for child in children):
                self.passing.add(module)


def _belongs(child: Node, module: str, dense: DensePass) -> bool:
    """Return whether the module's own forward created a node, or the node is one of its parameters."""
    variable = getattr(child, "variable", None)
    return isinstance(variable, nn.Parameter) or dense.trace.module_of(child) == module


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _from_the_leaves(root: Node | None) -> Iterator[Node]:
    """Yield every node once, children before their parents."""
    open_nodes, seen = [(root, False)] if root is not None else [], set()
    while open_nodes:
        node, is_done = open_nodes.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            open_nodes.append((node, True))
            open_nodes += [(child, False) for child in _children(node) if child not in seen]
