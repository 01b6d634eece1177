"""One forward through one segment of a model: runs its layers without a graph, and records how to run them again.

The model's own forward calls the layers with arguments that it computes: masks, positions, the residual stream. This
module records each call with its arguments. A tensor among them comes from outside the segment or from a previous
layer. The model may compute nothing between two layers. To detect such a computation, a layer's outputs are leaves that
require grad. A tensor computed from a leaf shows when it arrives at the next layer, or when a gradient arrives at the
leaf.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sparsebp_cli.backward.execution.segment.arguments import ArgumentSnapshot, NoGradientHook, refuse_hidden
from sparsebp_cli.backward.execution.segment.forward_context import ForwardContext, Versions
from sparsebp_cli.backward.observe.leaves import find_leaves
from sparsebp_cli.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class _External:
    """Placeholder of a tensor from outside, by its number."""

    number: int


@dataclass(frozen=True)
class _Internal:
    """Placeholder of a tensor that a layer returned, by the number of the call and of the output."""

    call: int
    leaf: int


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its forward, and its arguments with placeholders for tensors."""

    run: Callable[..., object]
    leaves: tuple[object, ...]
    spec: TreeSpec


class RecordedForward:
    """Records the layers of a segment as they run, then runs them again."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    def __init__(self, names: Sequence[str], modules: Sequence[nn.Module]) -> None:
        self.names, self.modules = tuple(names), tuple(modules)
        trained = {id(p): p for m in self.modules for p in m.parameters() if p.requires_grad}
        self.parameters: list[Tensor] = list(trained.values())
        self.given: list[Tensor] = []  # tensors from outside, until autograd saves them
        self._number: dict[int, int] = {}  # index in `given`, by id
        self._made: dict[int, tuple[weakref.ref[Tensor], _Internal]] = {}
        self._calls: list[_Call] = []
        self._versions, self._weights = Versions(), Versions()
        for parameter in (p for m in self.modules for p in m.parameters()):
            self._weights.note(parameter)
        self._context: ForwardContext | None = None

    def run(self, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the next layer by ``forward`` without a graph; tensors it returns are leaves that refuse gradients.

        Raises :class:`UnsupportedError` if something was computed since the layer before, a key/value cache is filled,
        or tensors enter or leave the layer in other ways than as arguments and outputs.
        """
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [_without_cache(leaf, self._name) for leaf in leaves]
        where = repr(self._name)
        refuse_hidden(leaves, where, given=True)
        if self._context is None:
            self._context = ForwardContext(self.modules, (t for t in leaves if isinstance(t, Tensor)))
        placeholders = tuple(self._placeholder(leaf) for leaf in leaves)
        if self._calls and not any(isinstance(leaf, _Internal) for leaf in placeholders):
            self._refuse_between()
        args, kwargs = tree_unflatten(leaves, spec)
        contents = ArgumentSnapshot((args, kwargs))
        captured = [(each, len(each)) for each in _find_captured()]
        with torch.no_grad(), self._context.without_cache():
            output = forward(*args, **kwargs)
        contents.refuse_changed(output, where)
        self._calls.append(_Call(forward, placeholders, spec))
        for each, length in captured:  # collected outputs, such as router logits, which a loss may use
            each[length:] = [self._guarded(leaf) if isinstance(leaf, Tensor) else leaf for leaf in each[length:]]
        outputs, spec = tree_flatten(output)
        refuse_hidden(outputs, where, given=False)
        return tree_unflatten([self._mark(leaf, number) for number, leaf in enumerate(outputs)], spec)

    def finish(self, output: object) -> tuple[list[object], list[int], TreeSpec]:
        """End the forward; return the output's leaves, the indices of leaves that can get a gradient, and their tree.

        Raises :class:`UnsupportedError` if a layer changed in place a tensor that the segment begins with.
        """
        assert self._context is not None
        self._context.keep_changes(self._guarded)
        changed = self._versions.find_changed()
        if changed is not None:
            raise UnsupportedError(
                f"segments: the segment that begins with {self.names[0]!r} must not change an input of shape "
                f"{tuple(changed.shape)} in place: let this segment begin with another layer"
            )
        leaves, spec = tree_flatten(output)
        self._made = {}
        return leaves, [n for n, leaf in enumerate(leaves) if _is_differentiable(leaf)], spec

    def release(self) -> list[Tensor]:
        """Return the tensors from outside and drop the references to them."""
        given, self.given, self._number, self._versions = self.given, [], {}, Versions()
        return given

    def run_again(self, given: Sequence[Tensor]) -> list[object]:
        """Run all layers again on ``given`` instead of the tensors from outside; return the last output's leaves.

        Raises :class:`UsageError` if a weight has changed since the forward.
        """
        changed = self._weights.find_changed()
        if changed is not None:
            raise UsageError(
                f"segments: a weight of shape {tuple(changed.shape)} in the segment that begins with "
                f"{self.names[0]!r} changed after its forward began: update weights only after the backward, "
                "because it recomputes layers"
            )
        assert self._context is not None
        outputs: list[list[object]] = []
        with self._context.restored():
            for call in self._calls:
                leaves = [_put(leaf, given, outputs) for leaf in call.leaves]
                args, kwargs = tree_unflatten(leaves, call.spec)
                outputs.append(tree_flatten(call.run(*args, **kwargs))[0])
        return outputs[-1]

    @property
    def _name(self) -> str:
        """The name of the layer that runs next."""
        return self.names[min(len(self._calls), len(self.names) - 1)]

    def _placeholder(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        made = self._made.get(id(leaf))
        # An id alone may belong to a deleted tensor.
        if made is not None and made[0]() is leaf:
            return made[1]
        if id(leaf) not in self._number:
            if self._calls and leaf.requires_grad:
                marks = {id(guarded) for ref, _ in self._made.values() if (guarded := ref()) is not None}
                if any(id(found) in marks for found in find_leaves([leaf])):
                    self._refuse_between()
            self._number[id(leaf)] = len(self.given)
            self.given.append(leaf)
            self._versions.note(leaf)
        return _External(self._number[id(leaf)])

    def _mark(self, leaf: object, number: int) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        guarded = self._guarded(leaf)
        self._made[id(guarded)] = weakref.ref(guarded), _Internal(len(self._calls) - 1, number)
        return guarded

    def _guarded(self, leaf: Tensor) -> Tensor:
        """Return a detached tensor with a hook that refuses gradients, for tensors inside the segment."""
        guarded = leaf.detach()
        if _is_differentiable(guarded) and any(t.requires_grad for t in (*self.parameters, *self.given)):
            guarded.requires_grad_().register_hook(NoGradientHook(self.names[len(self._calls) - 1]))
        return guarded

    def _refuse_between(self) -> NoReturn:
        before, after = self.names[len(self._calls) - 1], self._name
        raise UnsupportedError(
            f"segments: inside a segment, the model computes a tensor between the layers {before!r} and {after!r}: "
            f"let a segment begin with {after!r}"
        )


def _put(leaf: object, given: Sequence[Tensor], outputs: list[list[object]]) -> object:
    if isinstance(leaf, _External):
        return given[leaf.number]
    return outputs[leaf.call][leaf.leaf] if isinstance(leaf, _Internal) else leaf


def _find_captured() -> list[list[object]]:
    """Return the lists in which transformers collects outputs of modules, such as attentions and router logits."""
    # This name is private: the wrapper of a model's forward fills the lists, and transformers has no public access.
    loaded = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(loaded, "_active_collector", None)
    found = None if collector is None else collector.get()
    return [each for each in (found or {}).values() if isinstance(each, list)]


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _without_cache(leaf: object, name: str) -> object:
    """Return None for an empty key/value cache: a layer that runs twice would add its keys twice."""
    loaded = sys.modules.get("transformers.cache_utils")  # loaded if the model was passed a cache
    if loaded is None or not isinstance(leaf, loaded.Cache):
        return leaf
    if leaf.get_seq_length() > 0:
        raise UnsupportedError(f"segments: {name!r} got a key/value cache with earlier positions: pass an empty cache")
    return None
