"""Segmented backward of modules that run one after the other, without ``attach``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.backward.execution.segment.arguments import NoGradientHook, refuse_hidden
from sparsebp_cli.backward.execution.segment.forward_context import ForwardContext, Versions
from sparsebp_cli.backward.execution.segment.split import split_evenly
from sparsebp_cli.errors import UnsupportedError, UsageError

Module = Callable[[object], object]


def segmented_backward(
    segments: Iterable[Module | Sequence[Module]],
    x: object,
    loss_fn: Callable[[object], Tensor],
    *,
    num_segments: int | None = None,
    store: GradStore | None = None,
) -> tuple[Tensor, GradStore]:
    """Run forward and backward segment by segment, so that no two segments store their activations at once.

    The forward runs each segment without a graph and stores only its input. Then each segment, from the last to the
    first, runs with a graph and is differentiated. The gradient of its input goes to the segment before it. Gradients
    of parameters go to one store, which sums gradients of shared weights. The last segment runs once, the others twice;
    dropout, autocast and running statistics behave as if they had run once.

        loss, store = sbp.segmented_backward(model, x, lambda y: mse_loss(y, target), num_segments=4)
        store.apply()
        optimizer.step()

    Args:
        segments: An ``nn.Sequential``, or modules or functions of one argument; each entry, or sequence of them, is a
            segment.
        x: The input of the first segment. A segment's output is the only argument of the next, as in ``nn.Sequential``:
            a tensor, or tuples, lists and dicts of tensors.
        loss_fn: Maps the last segment's output to a scalar loss. It may have its own parameters.
        num_segments: Join the entries of ``segments`` to this number; None: one segment per entry.
        store: The store to which gradients are added, such as over micro-batches; None: a new one.

    Returns:
        The loss, without a graph, and the store. An ``x`` that requires grad has its gradient in the store.

    Raises:
        UsageError: An argument has the wrong type, there are no segments or fewer than ``num_segments``, gradients are
            disabled, ``x`` is not a leaf, or the loss is not one number that depends on a trained tensor.
        UnsupportedError: A segment changes its input in place, or takes or returns a tensor inside another object.
    """
    parts = _join(segments, num_segments)
    if not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of the last output, got {type(loss_fn).__name__}")
    if not (store is None or isinstance(store, GradStore)):
        raise UsageError(f"store must be a GradStore, got {type(store).__name__}")
    if not torch.is_grad_enabled():
        raise UsageError("segmented_backward needs gradients: call it outside torch.no_grad()")
    if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in tree_flatten(x)[0]):
        raise UsageError("x must be a leaf: pass x.detach().requires_grad_(), and read its gradient with store.pop")
    runs: list[_SegmentRun] = []
    value, reaches = x, any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten(x)[0])
    for number, part in enumerate(parts[:-1]):
        reaches = reaches or any(_is_trained(module) for module in part)
        runs.append(_SegmentRun(number, part, value))
        value = runs[-1].run_without_graph(wants_grad=reaches)
        if not reaches:
            runs.pop()  # no parameter up to here is trained, so no backward is needed
    loss = loss_fn(_run(parts[-1], value))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"loss_fn must return one number, got {got}")
    # A separate store, since it also holds gradients of segments' borders, and an error must not change the caller's.
    found = GradStore()
    found.backward(loss)
    # Drop its graph, so that the last segment's activations are freed before the next segment runs.
    loss = loss.detach()
    del value
    while runs:
        runs.pop().run_backward(found)
    return loss, found if store is None else store.merge(found)


class _SegmentRun:
    """One segment, from its forward to its backward."""

    def __init__(self, number: int, part: Sequence[Module], value: object) -> None:
        self._number, self._part = number, part
        # Flatten, so that each run gets new lists and dicts, which a module may change.
        self._leaves, self._spec = tree_flatten(value)
        self._outputs: list[object] = []

    def run_without_graph(self, *, wants_grad: bool) -> object:
        """Return the output as leaves, which require grad if ``wants_grad``."""
        where = f"segment {self._number}"
        refuse_hidden(self._leaves, where, given=True)
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        versions = Versions()
        for tensor in tensors:
            versions.note(tensor)
        self._context = ForwardContext((m for m in self._part if isinstance(m, nn.Module)), tensors)
        with torch.no_grad(), self._context.without_cache():
            output = _run(self._part, tree_unflatten(self._leaves, self._spec))
        self._context.keep_changes(self._guarded)
        if versions.find_changed() is not None:
            raise UnsupportedError(f"{where} must not change its input in place: begin the segment at another module")
        refuse_hidden(tree_flatten(output)[0], where, given=False)
        output = tree_map(lambda leaf: _as_leaf(leaf, wants_grad=wants_grad), output)
        self._outputs = tree_flatten(output)[0]
        return output

    def _guarded(self, tensor: Tensor) -> Tensor:
        """Return a detached copy of a tensor that a module has stored, with a hook that refuses gradients.

        The tensor was made without a graph, so a gradient that arrives at it would be lost.
        """
        guarded = tensor.detach()
        if guarded.is_floating_point() or guarded.is_complex():
            guarded.requires_grad_().register_hook(NoGradientHook(f"segment {self._number}"))
        return guarded

    def run_backward(self, store: GradStore) -> None:
        """Run with a graph, take the output's gradients from the store, and add the resulting gradients to it."""
        grads = [
            store.pop(leaf, None) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in self._outputs
        ]
        self._outputs = []
        if all(grad is None for grad in grads):
            return
        with self._context.restored():
            outputs = tree_flatten(_run(self._part, tree_unflatten(self._leaves, self._spec)))[0]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        del outputs
        if pairs:
            store.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _join(segments: Iterable[Module | Sequence[Module]], num_segments: int | None) -> list[list[Module]]:
    if not isinstance(segments, Iterable) or isinstance(segments, str):
        raise UsageError(f"segments must be an nn.Sequential or several modules, got {type(segments).__name__}")
    if not (num_segments is None or type(num_segments) is int):
        raise UsageError(f"num_segments must be a whole number, got {num_segments!r}")
    parts: list[list[Module]] = [list(e) if isinstance(e, Sequence) else [e] for e in segments]
    for part in parts:
        for module in part:
            if not callable(module):
                raise UsageError(f"a segment must be a module or a function, got {type(module).__name__}")
    if not parts or (num_segments is not None and not 1 <= num_segments <= len(parts)):
        wanted = f"{num_segments} segments of " if num_segments is not None else ""
        raise UsageError(
            f"the number of segments must be from 1 to the number of modules, got {wanted}{len(parts)} modules"
        )
    if num_segments is None:
        return parts
    starts = split_evenly(len(parts), num_segments)
    ends = [*starts[1:], len(parts)]
    return [[module for part in parts[a:b] for module in part] for a, b in zip(starts, ends, strict=True)]


def _run(part: Sequence[Module], value: object) -> object:
    for module in part:
        value = module(value)
    return value


def _is_trained(module: Module) -> bool:
    """Return whether a module has trained parameters; True for plain functions."""
    return not isinstance(module, nn.Module) or any(p.requires_grad for p in module.parameters())


def _as_leaf(leaf: object, *, wants_grad: bool) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf.requires_grad_(wants_grad and (leaf.is_floating_point() or leaf.is_complex()))
