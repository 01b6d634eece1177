"""What takes part in a backward pass node by node, and the hooks by which PyTorch's own engine lets it.

The Python walk (:mod:`sparsebp_cli.backward.node.python_walk`) asks the same visitors at the same places, so the two
can be held against each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.graph import Graph, GraphNode

Gradients = tuple[Tensor | None, ...]


class Visitor(ABC):
    """Sees every gradient on its way.

    Args:
        routes: Whether :meth:`after` can say anything other than what it was given.
    """

    routes: bool

    @abstractmethod
    def before(self, place: GraphNode, grads: Gradients) -> Gradients:
        """Return the gradients with which a node is run.

        Args:
            place: The node.
            grads: One for each of its forward's outputs; None where none arrived.

        Returns:
            The same, or others of the same shapes.
        """

    @abstractmethod
    def after(self, place: GraphNode, results: Gradients) -> Gradients:
        """Return the gradients that go on to a node's children.

        Args:
            place: The node, with a gradient and not a leaf.
            results: One for each of its edges.

        Returns:
            The same, with None where nothing goes on.
        """


@contextmanager
def visiting(graph: Graph, visitor: Visitor) -> Iterator[None]:
    """Let a visitor take part in the next backward pass of PyTorch's engine.

    Args:
        graph: Held meanwhile: hooks of a node are lost with it.
        visitor: Is asked at every node.

    Yields:
        None: As long as the hooks are there.
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
            # The engine runs a node that got nothing all the same; what comes of it stays here.
            return None if all(result is None for result in results) else (None,) * len(results)
        changed = self.visitor.after(self.place, results)
        return None if changed is results else changed


@contextmanager
def _idle_without_gradient(function: Any) -> Iterator[None]:
    """Make a Function of Python return nothing where nothing arrived: most fill zeros in, and then compute with them.

    Args:
        function: The node, which is also its ``ctx``.

    Yields:
        None: As long as it is changed.
    """
    arrived = True

    def look(grads: Gradients) -> None:
        nonlocal arrived
        arrived = any(grad is not None for grad in grads)

    def apply(*grads: Tensor | None) -> Any:
        if not arrived:
            return (None,) * len(function.needs_input_grad)
        return type(function).apply(function, *grads)

    one_output = len(function._input_metadata) == 1  # noqa: SLF001 - shapes of its outputs
    if one_output:
        function.set_materialize_grads(False)  # nobody reads these zeros: there is a gradient, or apply is idle
    function.apply = apply
    handle = function.register_prehook(look)
    try:
        yield
    finally:
        handle.remove()
        del function.apply
        if one_output:
            function.set_materialize_grads(True)  # cannot be asked for; zeros are right for every Function
