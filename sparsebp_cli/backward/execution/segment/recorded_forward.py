"""One forward pass through one segment of a model: its layers run without a graph, and what running them again needs.

The model's own forward calls the layers, with arguments that it makes: masks, positions, the stream. So each call is
noted with its arguments, and a tensor among them is one that came from outside, or what a layer before it gave. What
stands between two layers must be nothing: a layer's output is a leaf that requires grad, so whatever is computed from
it there is found out when it arrives at the next layer, or when a gradient arrives at the leaf.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sparsebp_cli.backward.execution.segment.arguments import ArgumentSnapshot, NoGradientHook, refuse_hidden
from sparsebp_cli.backward.execution.segment.forward_context import ForwardContext, Versions
from sparsebp_cli.backward.observe.leaves import find_leaves
from sparsebp_cli.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class _Given:
    """In the place of a tensor from outside: its number."""

    number: int


@dataclass(frozen=True)
class _Made:
    """In the place of a tensor that a layer gave: the number of the call, and which of its outputs."""

    call: int
    leaf: int


@dataclass(frozen=True)
class _Call:
    """One layer's call: how to run it, and its arguments with stand-ins for tensors."""

    run: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec


class RecordedForward:
    """Grows while the layers of the segment run; then it runs them again.

    Args:
        names: Of the layers, for errors.
        modules: The layers.
    """

    def __init__(self, names: Sequence[str], modules: Sequence[nn.Module]) -> None:
        self.names, self.modules = tuple(names), tuple(modules)
        trained = {id(p): p for m in self.modules for p in m.parameters() if p.requires_grad}
        self.parameters: list[Tensor] = list(trained.values())
        self.given: list[Tensor] = []  # held until autograd saves them
        self._number: dict[int, int] = {}  # in `given`, by identity
        self._made: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}
        self._calls: list[_Call] = []
        self._versions, self._weights = Versions(), Versions()
        for parameter in (p for m in self.modules for p in m.parameters()):
            self._weights.note(parameter)
        self._surrounding: ForwardContext | None = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the next layer without a graph.

        Args:
            forward: How.
            args: Its arguments.
            kwargs: Its named arguments.

        Returns:
            What it gives; tensors are leaves, at which no gradient may arrive.

        Raises:
            UnsupportedError: Something was computed since the layer before, a cache is filled, or tensors come or go in
                another way than as arguments and outputs.
        """
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [_without_cache(leaf, self._name) for leaf in leaves]
        where = repr(self._name)
        refuse_hidden(leaves, where, given=True)
        if self._surrounding is None:
            self._surrounding = ForwardContext(self.modules, (t for t in leaves if isinstance(t, Tensor)))
        stand_ins = tuple(self._stand_in(leaf) for leaf in leaves)
        if self._calls and not any(isinstance(leaf, _Made) for leaf in stand_ins):
            self._refuse_between()
        args, kwargs = tree_unflatten(leaves, spec)
        contents = ArgumentSnapshot((args, kwargs))
        captured = [(each, len(each)) for each in _find_captured()]
        with torch.no_grad(), self._surrounding.without_cache():
            output = forward(*args, **kwargs)
        contents.refuse_changed(output, where)
        self._calls.append(_Call(forward, stand_ins, spec))
        for each, length in captured:  # such as a router's scores, of which a loss may be made
            each[length:] = [self._as_mark(leaf) for leaf in each[length:]]
        outputs, spec = tree_flatten(output)
        refuse_hidden(outputs, where, given=False)
        return tree_unflatten([self._mark(leaf, number) for number, leaf in enumerate(outputs)], spec)

    def finish(self, output: Any) -> tuple[list[Any], list[int], TreeSpec]:
        """End the forward.

        Args:
            output: Of the last layer.

        Returns:
            The output's leaves, the places of those that a gradient can arrive at, and how they hang together.

        Raises:
            UnsupportedError: A layer changed a tensor in place that the segment begins with.
        """
        assert self._surrounding is not None
        self._surrounding.settle(self._as_mark)
        changed = self._versions.find_changed()
        if changed is not None:
            raise UnsupportedError(
                f"segments: the segment that begins with {self.names[0]!r} changes a tensor of shape "
                f"{tuple(changed.shape)} in place that it is given: begin it with another layer"
            )
        leaves, spec = tree_flatten(output)
        self._made = {}
        return leaves, [n for n, leaf in enumerate(leaves) if _is_differentiable(leaf)], spec

    def forget(self) -> list[Tensor]:
        """Return the tensors from outside, and hold them no more."""
        given, self.given, self._number, self._versions = self.given, [], {}, Versions()
        return given

    def again(self, given: Sequence[Tensor]) -> list[Any]:
        """Run all layers again, with a graph if that is enabled.

        Args:
            given: In the place of the tensors from outside.

        Returns:
            The leaves of the last layer's output.

        Raises:
            UsageError: A weight is no longer what it was in the forward.
        """
        changed = self._weights.find_changed()
        if changed is not None:
            raise UsageError(
                f"segments: a weight of shape {tuple(changed.shape)} in the segment that begins with {self.names[0]!r} "
                "was changed since its forward began: the layers would give something else the second time"
            )
        assert self._surrounding is not None
        outputs: list[list[Any]] = []
        with self._surrounding.again():
            for call in self._calls:
                leaves = [_put(leaf, given, outputs) for leaf in call.leaves]
                args, kwargs = tree_unflatten(leaves, call.spec)
                outputs.append(tree_flatten(call.run(*args, **kwargs))[0])
        return outputs[-1]

    @property
    def _name(self) -> str:
        """The layer whose turn it is."""
        return self.names[min(len(self._calls), len(self.names) - 1)]

    def _stand_in(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = self._made.get(id(leaf))
        if made is not None and made[0]() is leaf:
            return made[1]
        if id(leaf) not in self._number:
            if self._calls and leaf.requires_grad:
                marks = {id(mark) for ref, _ in self._made.values() if (mark := ref()) is not None}
                if any(id(found) in marks for found in find_leaves([leaf])):
                    self._refuse_between()
            self._number[id(leaf)] = len(self.given)
            self.given.append(leaf)
            self._versions.note(leaf)
        return _Given(self._number[id(leaf)])

    def _mark(self, leaf: Any, number: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        mark = self._as_mark(leaf)
        self._made[id(mark)] = weakref.ref(mark), _Made(len(self._calls) - 1, number)
        return mark

    def _as_mark(self, leaf: Any) -> Any:
        """Return a tensor of the segment's inside so that no gradient can arrive at it without a word."""
        if not isinstance(leaf, Tensor):
            return leaf
        mark = leaf.detach()
        if _is_differentiable(mark) and any(t.requires_grad for t in (*self.parameters, *self.given)):
            mark.requires_grad_().register_hook(NoGradientHook(self.names[len(self._calls) - 1]))  # type: ignore[no-untyped-call]
        return mark

    def _refuse_between(self) -> NoReturn:
        before, after = self.names[len(self._calls) - 1], self._name
        raise UnsupportedError(
            f"segments: between {before!r} and {after!r} something is computed that is in neither of them: "
            f"let a segment begin with {after!r}"
        )


def _put(leaf: Any, given: Sequence[Tensor], outputs: list[list[Any]]) -> Any:
    if isinstance(leaf, _Given):
        return given[leaf.number]
    return outputs[leaf.call][leaf.leaf] if isinstance(leaf, _Made) else leaf


def _find_captured() -> list[list[Any]]:
    """Return the lists in which transformers collects what modules compute: attentions, scores of routers."""
    loaded = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(loaded, "_active_collector", None)
    found = None if collector is None else collector.get()
    return [each for each in (found or {}).values() if isinstance(each, list)]


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _without_cache(leaf: Any, name: str) -> Any:
    """Return None for a key/value cache: a layer that runs twice would enter its keys twice."""
    loaded = sys.modules.get("transformers.cache_utils")  # a model that is given a cache has loaded it
    if loaded is None or not isinstance(leaf, loaded.Cache):
        return leaf
    if leaf.get_seq_length() > 0:
        raise UnsupportedError(f"segments: {name!r} is given keys and values of earlier positions")
    return None
