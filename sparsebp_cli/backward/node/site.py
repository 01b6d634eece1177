"""Sites at every node of the autograd graph, through hooks that exist during one backward pass.

A gradient policy gets every gradient that enters a node, including gradients of parameters, *before* the node uses it:
the literal meaning of a sparse backward. It saves no time, but it is the reference for the fast implementations. A
router gets the gradients that leave a node. The engine does not propagate those that it drops, and skips the work
behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.core.extension import SiteAdapter, SiteCost
from sparsebp_cli.backward.core.report import FlopEstimate
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.node.hooks import Gradients, Visitor, visiting
from sparsebp_cli.backward.node.python_walk import find_hook, is_checkpointed, refuse_hooks, walked
from sparsebp_cli.backward.node.router import Routing
from sparsebp_cli.backward.observe.attribution import Attribution
from sparsebp_cli.backward.observe.graph import Graph, GraphNode
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import EdgeRouter, Seen, Selection, Site, Split

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import SiteEngine
    from sparsebp_cli.backward.core.given import Given


@final
class NodeAdapter(SiteAdapter):
    """Every node of a loss's graph.

    Nodes made outside of the model, such as by a loss function, are also sites. ``exclude`` has globs over module
    names; gradients that enter nodes of such a module stay unchanged. With ``routing`` a router decides instead of a
    selector. Raises :class:`UsageError` if a pattern matches no module.
    """

    names: tuple[str, ...] = ()  # known only when there is a graph
    not_covered: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, exclude: Iterable[str] = (), routing: Routing | None = None) -> None:
        modules, patterns = dict(model.named_modules(remove_duplicate=False)), list(exclude)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise UsageError(f"exclude: {pattern!r} matches no module of the model{did_you_mean(pattern, modules)}")
        self.excluded = tuple(name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns))
        self._model, self._layers, self._routing = model, LayerNumbers(model), routing
        self._attribution: Attribution | None = None
        self._engine: SiteEngine | None = None

    def install(self, engine: SiteEngine) -> None:
        self._engine = engine
        check = engine.decisions.check_inside
        self._attribution = Attribution(self._model, at_exit=lambda output: _watch(output, check))

    def remove(self) -> None:
        if self._attribution is not None:
            self._attribution.remove()

    @contextmanager
    def backward_context(self, loss: Tensor) -> Iterator[Tensor]:
        engine, attribution = self._engine, self._attribution
        assert engine is not None
        assert attribution is not None
        if not engine.enabled:
            yield loss
            return
        graph = Graph(loss, {p: name for name, p in self._model.named_parameters()}, attribution)
        if engine.reference:
            refuse_hooks(self._model)
        walks = engine.reference or self._walks_around_checkpoints(graph)
        excluded = frozenset(self.excluded)
        if self._routing is None:
            visitor: Visitor = SelectorVisitor(engine, self._layers, excluded)
        else:
            visitor = self._routing.start(loss, graph, engine, self._model, excluded)
        if walks:
            yield walked(loss, graph, visitor)
        else:
            with visiting(graph, visitor):
                yield loss
        if self._routing is not None:
            self._routing.finish(engine, self._model)

    def _walks_around_checkpoints(self, graph: Graph) -> bool:
        if self._routing is None or not is_checkpointed(graph) or find_hook(self._model) is not None:
            return False
        assert self._engine is not None
        self._engine.notes["walk"] = (
            "Python, not PyTorch's engine, runs the backward graph here: the engine would recompute checkpointed "
            "layers that no gradient reaches"
        )
        return True


class NoCost(SiteCost):
    """The cost of a node. Nodes multiply masked gradients as zeros, so no policy saves FLOPs here."""

    @override
    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return zero dense and estimated FLOPs."""
        return FlopEstimate(0.0, 0.0)


@final
class SelectorVisitor(Visitor):
    """Passes every gradient that enters a node to the engine's selector, except in excluded modules."""

    routes = False

    def __init__(self, engine: SiteEngine, layers: LayerNumbers, excluded: frozenset[str]) -> None:
        self._engine, self._layers, self._excluded = engine, layers, excluded

    def before(self, place: GraphNode, grads: Gradients) -> Gradients:
        if place.module in self._excluded:
            return grads
        names = [place.name] if len(grads) == 1 else [f"{place.name}.{number}" for number in range(len(grads))]
        selected = tuple(
            None if grad is None else self._select(name, place.module, grad)
            for name, grad in zip(names, grads, strict=True)
        )
        return grads if all(a is b for a, b in zip(selected, grads, strict=True)) else selected

    @override
    def after(self, place: GraphNode, results: Gradients) -> Gradients:
        return results

    def _select(self, name: str, module: str, grad: Tensor) -> Tensor:
        if grad.layout != torch.strided:
            raise UnsupportedError(f"sites='nodes' needs gradients of layout strided, got {grad.layout} at {name!r}")
        shown = grad.reshape(1, -1) if grad.dim() < 2 else grad.flatten(0, -2)
        site = Site(name, shown.shape[1], (1,) if grad.dim() < 2 else tuple(grad.shape[:-1]), self._layer_of(module))
        selection = self._engine.decisions.decide(site, Seen(shown), NoCost())
        assert not isinstance(selection, Split), "attach should have refused it"
        return grad if selection is None else selection.apply(shown).view(grad.shape)

    def _layer_of(self, module: str) -> int | None:
        return self._layers.number_of(module)


def _watch(output: object, check: Callable[[], None]) -> None:
    """Call ``check`` when a gradient enters the model's output, to refuse a backward pass from outside."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.register_hook(lambda _: check())
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            _watch(part, check)


def make_adapter(policy: EdgeRouter, model: nn.Module, given: Given) -> NodeAdapter:
    """Return the adapter for the nodes where a router decides."""
    return NodeAdapter(model, given.exclude, Routing(policy))
