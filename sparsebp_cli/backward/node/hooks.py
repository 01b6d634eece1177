"""Visitors of the nodes of a backward pass, and the hooks through which PyTorch's engine calls them.

The Python walk (:mod:`sparsebp_cli.backward.node.python_walk`) calls the same visitors at the same places, so that
tests can compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sparsebp_cli.backward.observe.internals import outputs_of

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.graph import Graph, GraphNode

Gradients = tuple[Tensor | None, ...]


class Visitor(ABC):
    """Sees, and may change, every gradient in a backward pass."""

    routes: bool  # whether `after` can change anything

    @abstractmethod
    def before(self, place: GraphNode, grads: Gradients) -> Gradients:
        """Return the gradients for running a node, one per output of its forward; None if no gradient arrived."""

    @abstractmethod
    def after(self, place: GraphNode, results: Gradients) -> Gradients:
        """Return the gradients for a node's children, one per edge; None stops the gradient on this edge.

        The engine calls this for nodes with a gradient that are not leaves.
        """


@contextmanager
def visiting(graph: Graph, visitor: Visitor) -> Iterator[None]:
    """Let a visitor take part in the next backward pass of PyTorch's engine.

    The graph must stay alive meanwhile, since a node's hooks are deleted together with it.
    """
    with ExitStack() as stack:
        for place in graph.places.values():
            stack.callback(place.node.register_prehook(_Before(place, visitor)).remove)
            if visitor.routes and place.node not in graph.leaves:
                stack.callback(place.node.register_hook(_After(place, visitor)).remove)
                if isinstance(place.node, BackwardCFunction):
                    stack.enter_context(_idle_without_gradient(place.node))
        yield


class _Before:
    def __init__(self, place: GraphNode, visitor: Visitor) -> None:
        self.place, self.visitor = place, visitor

    def __call__(self, grads: Gradients) -> Gradients | None:
        changed = self.visitor.before(self.place, grads)
        return None if changed is grads else changed


class _After:
    def __init__(self, place: GraphNode, visitor: Visitor) -> None:
        self.place, self.visitor = place, visitor

    def __call__(self, results: Gradients, grads: Gradients) -> Gradients | None:
        if all(grad is None for grad in grads):
            # The engine also runs a node without any gradient. Do not pass on its results.
            return None if all(result is None for result in results) else (None,) * len(results)
        changed = self.visitor.after(self.place, results)
        return None if changed is results else changed


@contextmanager
def _idle_without_gradient(function: Any) -> Iterator[None]:
    """Make a Python Function's node return nothing if no gradient arrived.

    Most Functions would materialise zeros, and then compute with them. ``function`` is the node, which is also its
    ``ctx``.
    """
    arrived = True

    def look(grads: Gradients) -> None:
        nonlocal arrived
        arrived = any(grad is not None for grad in grads)

    def apply(*grads: Tensor | None) -> object:
        if not arrived:
            return (None,) * len(function.needs_input_grad)
        return type(function).apply(function, *grads)

    one_output = len(outputs_of(function)) == 1
    if one_output:
        function.set_materialize_grads(False)  # never read: either the gradient exists, or apply returns early
    function.apply = apply
    handle = function.register_prehook(look)
    try:
        yield
    finally:
        handle.remove()
        del function.apply
        if one_output:
            function.set_materialize_grads(True)  # the former value cannot be read; zeros suit every Function
