"""The autograd graph below a loss: its nodes in the order of a backward pass, each with a name.

A name consists of the innermost module that created the node, the node's kind and a number, such as
``model.layers.0.mlp.MulBackward0.0``, or is a parameter's own name; the same code gives the same names in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sparsebp_cli.backward.observe.internals import sequence_number_of, variable_of
from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from sparsebp_cli.backward.observe.attribution import Attribution

LEAF = "torch::autograd::AccumulateGrad"
# Nodes that may lie between a parameter and its use, and only view or cast it.
_VIEWS = frozenset(
    f"{view}Backward0"
    for view in (
        *("Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T"),
        *("ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
)
_HIDING = {
    "checkpoint": "reentrant activation checkpointing; use use_reentrant=False",
    "compiledfunction": "torch.compile; leave the model uncompiled",
    "fusedlinearcrossentropy": "a fused head and loss, which differentiates in the forward; switch it off",
}


@dataclass(frozen=True)
class GraphNode:
    """One node of the graph."""

    node: Node  # a reference that keeps it alive, because its hooks are deleted with it
    name: str  # unique in the graph, and the same in every step
    number: int  # index in the order of a backward pass; leaves come last
    module: str  # the innermost module that created it, or the owner of a parameter; empty if unknown
    parameter: str | None  # the name of the parameter that it is or views


class Graph:
    """Every node that a backward pass from a loss would run; refuses nodes that hide others."""

    leaves: frozenset[Node]

    def __init__(self, loss: Tensor, parameters: Mapping[Tensor, str], attribution: Attribution) -> None:
        nodes = sorted(_reach(loss), key=sequence_number_of, reverse=True)
        leaves = [node for node in nodes if node.name() == LEAF]
        inner = nodes[len(leaves) :]  # leaves come first: they have the largest number, and the sort is stable
        self.leaves = frozenset(leaves)  # nodes that accumulate gradients
        self.parameters: dict[Node, Tensor] = {}  # the model's parameters among the leaves
        self.places: dict[Node, GraphNode] = {}  # in the order of a backward pass; leaves come last
        names = _name_inner(inner, attribution)
        num_inputs = 0
        found: dict[Node, tuple[str, str, str | None]] = {}
        for node in leaves:
            variable = variable_of(node)
            parameter = parameters.get(variable)
            if parameter is None:
                found[node] = f"input.{num_inputs}", "", None
                num_inputs += 1
            else:
                self.parameters[node] = variable
                found[node] = parameter, parameter.rpartition(".")[0], parameter
        for node in reversed(inner):  # children before their parents
            edges = node.next_functions
            behind = edges[0][0] if len(edges) == 1 and node.name() in _VIEWS else None
            found[node] = *names[node], None if behind is None else found[behind][2]
        for number, node in enumerate([*inner, *leaves]):
            name, module, parameter = found[node]
            self.places[node] = GraphNode(node, name, number, module, parameter)


def walk(*roots: Node | None) -> Iterator[Node]:
    """Yield every node that is a root or below one, each once."""
    seen = {root: None for root in roots if root is not None}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen[child] = None
                waiting.append(child)


def _reach(loss: Tensor) -> list[Node]:
    if loss.grad_fn is None:
        return []
    found, waiting = {loss.grad_fn: None}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        _refuse_hiding(node)
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def _refuse_hiding(node: Node) -> None:
    kind = node.name().lower()
    if not kind.endswith("backward"):  # not a Python Function: names of native nodes end in a number
        return
    reason = next((reason for word, reason in _HIDING.items() if word in kind), None)
    if reason is not None:
        raise UnsupportedError(f"sites='nodes' cannot see into {node.name()}: {reason}")


def _name_inner(inner: list[Node], attribution: Attribution) -> dict[Node, tuple[str, str]]:
    """Name inner nodes. Nodes of one kind within a module are numbered in the order of the forward."""
    seen: Counter[str] = Counter()
    names: dict[Node, tuple[str, str]] = {}
    for node in reversed(inner):
        module = attribution.name_of(node) or ""
        stem = ".".join(part for part in (module, node.name().rpartition("::")[2]) if part)
        names[node] = f"{stem}.{seen[stem]}", module
        seen[stem] += 1
    return names
