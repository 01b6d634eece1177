"""A backward pass in plain Python over ``grad_fn.next_functions``: the oracle for what hooks do to PyTorch's engine.

It gives the bits of ``loss.backward()``: the node that was made last runs first, gradients that meet are added in that
order, and each is summed, cast and moved to what the forward had, as the engine does between any two nodes. It costs a
few microseconds a node more. Hooks do not run (those after a parameter's accumulation do), so where a hook matters it
is refused: see :func:`refuse_hooks`.
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
from sparsebp_cli.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from sparsebp_cli.backward.observe.graph import Graph

_WALKED = "sparsebp.walked"


def walked(loss: Tensor, graph: Graph, visitor: Visitor) -> Tensor:
    """Return a tensor equal to a loss whose backward pass is a walk.

    So whatever runs the pass and scales the loss before (accelerate) can go on doing so.

    Args:
        loss: What is differentiated.
        graph: Below it.
        visitor: Is asked at every node.

    Returns:
        The tensor to call ``backward`` on, once.
    """
    root = cast("Node", loss.grad_fn)
    return cast("Tensor", _Walk.apply(loss.detach().requires_grad_(), root, loss.output_nr, graph, visitor))  # type: ignore[no-untyped-call]


def walk(root: Node, output_nr: int, grad: Tensor, graph: Graph, visitor: Visitor) -> None:
    """Run a backward pass; parameters collect their gradients, and what was saved for it is released.

    Args:
        root: Where it starts.
        output_nr: Of which of the root's outputs ``grad`` is the gradient.
        grad: The gradient to start with.
        graph: Below the root.
        visitor: Is asked at every node.

    Raises:
        UsageError: The graph was walked before.
    """
    notes = cast("dict[Any, Any]", root.metadata)
    if notes.get(_WALKED):
        raise UsageError("this loss was walked before and what its backward needs is released: run the forward again")
    notes[_WALKED] = True
    waiting = dict.fromkeys(graph.places, 0)  # how many edges have yet to say what comes over them
    for node in graph.places:
        for child, _ in node.next_functions:
            if child is not None:
                waiting[child] += 1
    arrived: dict[Node, list[Tensor | None]] = {root: [None] * _num_outputs(root)}
    arrived[root][output_nr] = grad
    # Leaves first, as in the engine: their gradients are the largest and are needed no more.
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
    """Return whether what nodes saved is computed again when they ask for it.

    PyTorch's engine has a node ask before it looks whether a gradient arrived.

    Args:
        graph: That is to be passed.

    Returns:
        Whether any node lies in a checkpointed part.
    """
    hooks = (getattr(saved, "unpack_hook", None) for node in graph.places for saved in _saved(node))
    return any(getattr(hook, "__module__", None) == torch.utils.checkpoint.__name__ for hook in hooks)


def find_hook(model: nn.Module) -> str | None:
    """Return what has a hook that a walk would leave out.

    Hooks on tensors inside the forward cannot be seen.

    Args:
        model: That is to be differentiated.

    Returns:
        The name of the first module or parameter with a hook of its backward; None: there is none.
    """
    parts: dict[str, Any] = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for name, part in parts.items():
        # There is no other way to ask. Parameters have no hooks before their backward.
        if part._backward_hooks or getattr(part, "_backward_pre_hooks", None):  # noqa: SLF001
            return name
    return None


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a model on which a walk would silently leave something out.

    Args:
        model: That is to be differentiated.

    Raises:
        UnsupportedError: A hook of its backward is registered, or gradients are reduced over processes.
    """
    refuse_processes(model, execution="reference", sites="nodes")
    hooked = find_hook(model)
    if hooked is not None:
        raise UnsupportedError(f"execution='reference' at sites='nodes' runs no backward hooks; {hooked!r} has one")


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
    return len(node._input_metadata)  # noqa: SLF001 - what the engine itself asks


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
    """Run a Function of Python as the engine does: zeros for what is missing, results by forward argument."""
    shapes = function._input_metadata  # noqa: SLF001
    filled = (
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
        for grad, meta in zip(grads, shapes, strict=True)
    )
    results = function.apply(*filled)
    results = results if isinstance(results, tuple) else (results,)
    # An edge stands for each tensor among the arguments, a result for each argument.
    wanted = iter([result for result, needs in zip(results, function.needs_input_grad, strict=False) if needs])
    return tuple(None if child is None else next(wanted) for child, _ in function.next_functions)


def _fit(grad: Tensor | None, child: Node | None, output_nr: int) -> Tensor | None:
    """Bring a gradient to the shape, dtype and device of what the forward had."""
    if grad is None or child is None:
        return None
    meta = child._input_metadata[output_nr]  # noqa: SLF001
    if grad.shape != meta.shape:
        grad = grad.sum_to_size(meta.shape)
    return grad if (grad.dtype, grad.device) == (meta.dtype, meta.device) else grad.to(meta.device, meta.dtype)


def _release(node: Node) -> None:
    """Let go of what a node saved, as the engine does once it ran: a graph would hold all activations to the end."""
    if isinstance(node, BackwardCFunction):
        cast("Any", node).maybe_clear_saved_tensors()
        return
    for saved in _saved(node):
        # What a hook packs takes the tensor's place. Nothing may have been saved; and hooks may be there already
        # (checkpointing), which let go themselves.
        with suppress(RuntimeError):
            saved.register_hooks(lambda _: None, lambda _: None)


def _saved(node: Node) -> Iterator[Any]:
    """Yield a handle on each tensor that a node of the engine's own kinds saved."""
    for name in _names_of_saved(type(node)):
        saved = getattr(node, name)
        yield from (each for each in (saved if isinstance(saved, tuple | list) else (saved,)) if each is not None)


@cache
def _names_of_saved(kind: type[object]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
