"""Checks of a layer's arguments and outputs: tensors in tuples, lists and dicts are supported, others are refused.

A segment runs twice, and its gradients flow through its arguments and outputs. It would miss a tensor inside another
object, and a layer that writes into a list or object would write twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsebp_cli.errors import UnsupportedError

_ALLOWED = "allowed: tensors, and tuples, lists and dicts of them"


class ArgumentSnapshot:
    """The contents of lists, dicts and objects among a layer's arguments, to detect changes by the layer."""

    def __init__(self, tree: object) -> None:
        self._found = [(container, _values(container)) for container in _containers(tree)]

    def refuse_changed(self, output: object, where: str) -> None:
        """Raise :class:`UnsupportedError` if the layer changed an argument that it does not return."""
        changed = [c for c, before in self._found if not are_same(before, _values(c))]
        if not changed:
            return
        returned = {id(container) for container in _containers(output)}
        for container in changed:
            if id(container) not in returned:
                raise UnsupportedError(
                    f"segments: {where} changes its argument, a {type(container).__name__}, but does not return it, so "
                    "the backward would repeat the change: return the changed argument"
                )


def refuse_hidden(leaves: Iterable[object], where: str, *, given: bool) -> None:
    """Raise :class:`UnsupportedError` for a tensor inside an object, whose gradient would be lost.

    Objects among arguments (``given``) may hold tensors without gradients, such as masks.
    """
    for leaf in leaves:
        for value in () if isinstance(leaf, Tensor) else tree_leaves(_values(leaf)):
            if not isinstance(value, Tensor):
                continue
            if value.requires_grad or (not given and (value.is_floating_point() or value.is_complex())):
                what = "is given" if given else "returns"
                raise UnsupportedError(
                    f"segments: {where} {what} a tensor inside a {type(leaf).__name__}, where segments cannot see "
                    f"its gradient; {_ALLOWED}"
                )


def _containers(tree: object) -> Iterator[object]:
    """Yield every list, mapping and object that may contain tensors, outer ones first."""
    if isinstance(tree, Tensor | nn.Module | type):
        return
    if isinstance(tree, list | Mapping) or (not isinstance(tree, tuple) and hasattr(tree, "__dict__")) or _values(tree):
        yield tree
    if isinstance(tree, list | tuple | Mapping):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _containers(value)
    else:
        for value in _values(tree):
            yield from _containers(value)


def _values(container: object) -> list[object]:
    """Return the contents of a list or mapping, or an object's attributes that are tensors or contain some."""
    if isinstance(container, list):
        return list(container)
    if isinstance(container, Mapping):
        return [*container, *container.values()]
    attributes = getattr(container, "__dict__", {})
    names = getattr(type(container), "__slots__", ())
    slots = [getattr(container, name, None) for name in ((names,) if isinstance(names, str) else names)]
    return [value for value in (*dict(attributes).values(), *slots) if holds_tensor(value)]


def holds_tensor(value: object) -> bool:
    """Return whether a value is a tensor, or a tuple, list or dict that contains one."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def are_same(before: list[object], after: list[object]) -> bool:
    """Return whether two lists contain the same objects."""
    return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))


class NoGradientHook:
    """Tensor hook inside a segment, in the layer ``name``, that refuses a gradient, which would be lost there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _: Tensor) -> NoReturn:
        raise UnsupportedError(
            f"segments: the loss uses a tensor that {self._name!r} computes inside a segment, where no graph is kept: "
            "use only outputs of segments, or tensors of the last segment"
        )
