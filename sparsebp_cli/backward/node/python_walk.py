"""A backward pass in plain Python over ``grad_fn.next_functions``: the reference for hooks on PyTorch's engine.

Its results are bit-identical to ``loss.backward()``: the latest node runs first, gradients of one tensor are summed in
that order, and each is reduced, cast and moved to match the forward, like the engine does between nodes. It costs a few
microseconds per node. It runs no hooks, except hooks after a parameter's accumulation, so :func:`refuse_hooks` refuses
models with other hooks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function, once_differentiable

from sparsebp_cli.backward.core.process import refuse_processes
from sparsebp_cli.backward.node.hooks import Gradients, Visitor
from sparsebp_cli.backward.observe.internals import has_backward_hooks, outputs_of
from sparsebp_cli.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from sparsebp_cli.backward.observe.graph import Graph

_WALKED = "sparsebp.walked"


def walked(loss: Tensor, graph: Graph, visitor: Visitor) -> Tensor:
    """Return a tensor equal to a loss whose backward pass is a walk; call ``backward`` on it once.

    Code that scales the loss and starts the pass, such as accelerate, then works unchanged.
    """
    root = cast("Node", loss.grad_fn)
    return cast("Tensor", _Walk.apply(loss.detach().requires_grad_(), root, loss.output_nr, graph, visitor))  # type: ignore[no-untyped-call]


def walk(root: Node, output_nr: int, grad: Tensor, graph: Graph, visitor: Visitor) -> None:
    """Run a backward pass from output ``output_nr`` of a root node.

    Parameters accumulate their gradients, and the walk releases saved tensors. Raises :class:`UsageError` if the graph
    was walked before.
    """
    notes = cast("dict[object, object]", root.metadata)
    if notes.get(_WALKED):
        raise UsageError("the backward of this loss has already run and released its graph: run the forward again")
    notes[_WALKED] = True
    waiting = dict.fromkeys(graph.places, 0)  # edges into each node that have not been processed
    for node in graph.places:
        for child, _ in node.next_functions:
            if child is not None:
                waiting[child] += 1
    arrived: dict[Node, list[Tensor | None]] = {root: [None] * _num_outputs(root)}
    arrived[root][output_nr] = grad
    # Leaves run first, as in PyTorch's engine, so that their large gradients are accumulated and freed early.
    ready = [_order(graph, root)]
    nodes = list(graph.places)
    with torch.no_grad():
        while ready:
            node = nodes[heapq.heappop(ready)[1]]
            grads = tuple(arrived.pop(node, ()))
            results = _run(node, grads, graph, visitor) if any(g is not None for g in grads) else None
            _release(node)
            for number, (child, child_output) in enumerate(node.next_functions):
                if child is None:
                    continue
                result = None if results is None else results[number]
                if result is not None:
                    slots = arrived.setdefault(child, [None] * _num_outputs(child))
                    before = slots[child_output]
                    slots[child_output] = result if before is None else before + result
                waiting[child] -= 1
                if waiting[child] == 0:
                    heapq.heappush(ready, _order(graph, child))


def is_checkpointed(graph: Graph) -> bool:
    """Return whether any node is in a checkpointed part, so that reading its saved tensors runs a forward again.

    PyTorch's engine reads the saved tensors before it checks whether a gradient arrived.
    """
    hooks = (getattr(saved, "unpack_hook", None) for node in graph.places for saved in _saved(node))
    return any(getattr(hook, "__module__", None) == torch.utils.checkpoint.__name__ for hook in hooks)


def find_hook(model: nn.Module) -> str | None:
    """Return the name of the first module or parameter with a backward hook, which a walk would skip; None without one.

    Hooks on tensors inside the forward cannot be detected.
    """
    parts: dict[str, nn.Module | nn.Parameter] = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for name, part in parts.items():
        if has_backward_hooks(part):
            return name
    return None


def refuse_hooks(model: nn.Module) -> None:
    """Raise :class:`UnsupportedError` if a walk would skip backward hooks or a reduction over processes."""
    refuse_processes(model, execution="reference", sites="nodes")
    hooked = find_hook(model)
    if hooked is not None:
        raise UnsupportedError(
            f"execution='reference' with sites='nodes' runs no backward hooks: remove the hook of {hooked!r}"
        )


class _Walk(Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, root: Node, output_nr: int, graph: Graph, visitor: Visitor) -> Tensor:
        ctx.walk = root, output_nr, graph, visitor
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        root, output_nr, graph, visitor = ctx.walk
        walk(root, output_nr, grad, graph, visitor)
        return (None,) * 5


def _order(graph: Graph, node: Node) -> tuple[bool, int]:
    return node not in graph.leaves, graph.places[node].number


def _num_outputs(node: Node) -> int:
    return len(outputs_of(node))


def _run(node: Node, grads: Gradients, graph: Graph, visitor: Visitor) -> Gradients:
    place = graph.places[node]
    grads = visitor.before(place, grads)
    if isinstance(node, BackwardCFunction):
        results = _run_function(node, grads)
    else:
        results = node(*grads)  # type: ignore[operator]
        results = results if isinstance(results, tuple) else (results,)
    if node in graph.leaves:
        return ()
    results = tuple(_fit(result, *edge) for result, edge in zip(results, node.next_functions, strict=True))
    return visitor.after(place, results) if visitor.routes else results


def _run_function(function: Any, grads: Gradients) -> Gradients:
    """Run a Python Function as the engine does: with zeros for missing gradients, and results by forward argument."""
    shapes = outputs_of(function)
    filled = (
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
        for grad, meta in zip(grads, shapes, strict=True)
    )
    results = function.apply(*filled)
    results = results if isinstance(results, tuple) else (results,)
    # There is an edge per tensor argument, but a result per argument.
    wanted = iter([result for result, needs in zip(results, function.needs_input_grad, strict=False) if needs])
    return tuple(None if child is None else next(wanted) for child, _ in function.next_functions)


def _fit(grad: Tensor | None, child: Node | None, output_nr: int) -> Tensor | None:
    """Convert a gradient to the shape, dtype and device of the forward's tensor."""
    if grad is None or child is None:
        return None
    meta = outputs_of(child)[output_nr]
    if grad.shape != meta.shape:
        grad = grad.sum_to_size(meta.shape)
    return grad if (grad.dtype, grad.device) == (meta.dtype, meta.device) else grad.to(meta.device, meta.dtype)


def _release(node: Node) -> None:
    """Release a node's saved tensors, like the engine after the node ran. Otherwise all activations would live until
    the end.
    """
    if isinstance(node, BackwardCFunction):
        cast("Any", node).maybe_clear_saved_tensors()
        return
    for saved in _saved(node):
        # register_hooks replaces the saved tensor by the result of the first hook. It raises if there is no tensor, or
        # if there are hooks already, such as checkpointing's, which release the tensor themselves.
        with suppress(RuntimeError):
            saved.register_hooks(lambda _: None, lambda _: None)


def _saved(node: Node) -> Iterator[Any]:
    """Yield a handle on each tensor saved by a node that is not a Python Function."""
    for name in _names_of_saved(type(node)):
        saved = getattr(node, name)
        yield from (each for each in (saved if isinstance(saved, tuple | list) else (saved,)) if each is not None)


@cache
def _names_of_saved(kind: type[object]) -> tuple[str, ...]:
    # torch makes an attribute `_raw_saved_NAME` for each saved tensor, and has no list of them.
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
