"""Applies a router's decisions in a backward pass, and counts where the gradient went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.process import refuse_processes
from sparsebp_cli.backward.core.report import Route
from sparsebp_cli.backward.node.hooks import Gradients, Visitor
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Edge, EdgeRouter, Step

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.observe.graph import Graph, GraphNode


@final
class Routing:
    """One router in one model."""

    def __init__(self, router: EdgeRouter) -> None:
        self.router = router
        self._visitor: Router | None = None

    def start(
        self, loss: Tensor, graph: Graph, engine: EngineView, model: nn.Module, excluded: frozenset[str]
    ) -> Router:
        """Return the visitor for the next pass; with lookahead, run a full pass first.

        Nodes of ``excluded`` modules pass everything on. Raises :class:`UnsupportedError` for several processes.
        """
        refuse_processes(model, [self.router], sites="nodes")
        ahead = Lookahead(loss, graph, self.router) if self.router.lookahead else None
        self._visitor = Router(self.router, engine.now(), graph, excluded, ahead)
        return self._visitor

    def finish(self, engine: EngineView, model: nn.Module) -> None:
        """Count the completed pass; with ``missing: zero``, fill in zero gradients."""
        assert self._visitor is not None
        engine.add_route(self._visitor.route())
        self._visitor = None
        if self.router.missing == "zero":
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


@final
class Lookahead:
    """The size of every parameter's dense gradient, from a dense pass that keeps the graph, and the nodes that lead to
    the parameter.
    """

    largest: Node | None

    def __init__(self, loss: Tensor, graph: Graph, router: EdgeRouter) -> None:
        leaves = list(graph.parameters)
        # Do not accumulate gradients, since `.grad` belongs to the pass that follows.
        gradients = torch.autograd.grad(
            loss, [graph.parameters[leaf] for leaf in leaves], retain_graph=True, allow_unused=True
        )
        found = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
        sizes = router.sizes([gradient for _, gradient in found]) if found else []
        # The leaf with the largest gradient behind each node. Places are sorted: in reverse, children precede parents.
        self._best: dict[Node, tuple[float, Node]] = {
            leaf: (size, leaf) for (leaf, _), size in zip(found, sizes, strict=True)
        }
        self._bit: dict[Node, int] = {leaf: 1 << number for number, (leaf, _) in enumerate(found)}
        self._behind = dict(self._bit)  # the leaves behind a node, as bits
        self.largest = max(self._best.values(), key=lambda pair: pair[0], default=(0.0, None))[1]
        inner = [node for node in graph.places if node not in graph.leaves]
        for node in reversed(inner):
            children = [child for child, _ in node.next_functions if child in self._best]
            if children:
                self._best[node] = max((self._best[child] for child in children), key=lambda pair: pair[0])
                self._behind[node] = 0
                for child in children:
                    self._behind[node] |= self._behind[child]

    def misses(self, children: Mapping[int, Node], chosen: set[int]) -> bool | None:
        """Return whether the chosen edges exclude the largest gradient reachable from ``children``; None if none is."""
        reachable = [self._best[child] for child in children.values() if child in self._best]
        if not reachable:
            return None
        best = max(reachable, key=lambda pair: pair[0])[1]
        return not any(self._behind.get(children[number], 0) & self._bit[best] for number in chosen)


@final
class Router(Visitor):
    """Calls the router at every node of one pass. ``ahead`` has the results of a dense pass, if there was one."""

    routes = True

    def __init__(
        self, router: EdgeRouter, step: Step, graph: Graph, excluded: frozenset[str], ahead: Lookahead | None
    ) -> None:
        self._router, self._step, self._graph, self._excluded, self._ahead = router, step, graph, excluded, ahead
        self._reached = 0
        self._parameters: set[str] = set()
        self._decisions = self._judged = self._misses = 0
        self._found_largest = False

    def before(self, place: GraphNode, grads: Gradients) -> Gradients:
        if any(grad is not None for grad in grads):
            self._reached += 1
            if place.node in self._graph.parameters:
                self._parameters.add(place.name)
                self._found_largest |= self._ahead is not None and place.node is self._ahead.largest
        return grads

    def after(self, place: GraphNode, results: Gradients) -> Gradients:
        if place.module in self._excluded:
            return results
        found = {
            i: child
            for i, (child, _) in enumerate(place.node.next_functions)
            if child is not None and results[i] is not None
        }
        if not found:
            return results
        edges = [self._edge(child, results[i]) for i, child in found.items()]
        before = self._step
        step = Step(before.index, before.micro_batch, place.number, before.seed, before.draw, on_draw=before.on_draw)
        chosen = self._check(self._router.at(before).route(edges, step), len(edges))
        numbers = list(found)
        going_on = {numbers[i] for i in chosen}
        if len(found) > 1:
            self._decisions += 1
            if self._ahead is not None:
                missed = self._ahead.misses(found, going_on)
                self._judged += missed is not None
                self._misses += bool(missed)
        return tuple(result if i in going_on else None for i, result in enumerate(results))

    def route(self) -> Route:
        """Return the route of the gradient."""
        return Route(
            num_backwards=1,
            num_nodes=len(self._graph.places),
            num_nodes_reached=self._reached,
            parameters=frozenset(self._parameters),
            num_decisions=self._decisions,
            num_judged=self._judged,
            num_misses=self._misses,
            num_largest_reached=int(self._found_largest) if self._ahead is not None else 0,
        )

    def _edge(self, child: Node, gradient: Tensor | None) -> Edge:
        assert gradient is not None
        place = self._graph.places[child]
        return Edge(gradient, place.parameter is not None, place.parameter or place.name)

    def _check(self, chosen: object, number: int) -> list[int]:
        found = list(chosen) if isinstance(chosen, list | tuple | range) else None
        wrong = found is None or not all(type(i) is int and 0 <= i < number for i in found)
        if found is None or wrong or len(set(found)) != len(found):
            name = type(self._router).__name__
            raise PolicyError(f"{name}.route must return numbers in [0, {number}), each at most once, got {chosen!r}")
        return found
