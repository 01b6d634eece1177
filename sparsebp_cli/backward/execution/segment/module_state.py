"""What modules keep beside parameters and buffers: counts, tensors, generators of their own, lists that are filled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_EVERY = frozenset(nn.Module().__dict__) | {"forward"}  # hooks, parameters, and what the engine puts there
_MISSING = object()


class ModuleState:
    """Noted when it is made, which is just before the forward.

    Args:
        modules: That will run, with all that is in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, _attributes(module)) for module in modules]
        values = [value for _, attributes in self._before for value in attributes.values()]
        self._generators = [(each, _get_state(each)) for each in values if _is_generator(each)]
        self._lists = [(each, list(each)) for each in values if isinstance(each, list)]
        self._changes: list[tuple[nn.Module, str, Any]] = []

    def settle(self, mark: Callable[[Tensor], Tensor]) -> None:
        """Forget what the forward, which has ended, did not change.

        Args:
            mark: Makes of a tensor that a module has newly kept one at which no gradient may arrive without a word: it
                was computed without a graph.
        """
        for module, before in self._before:
            after = _attributes(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name, _MISSING), after.get(name, _MISSING)
                if old is not new:
                    self._changes.append((module, name, old.detach() if isinstance(old, Tensor) else old))
                    if isinstance(new, Tensor | list | tuple | dict):
                        module.__dict__[name] = tree_map(lambda v: mark(v) if isinstance(v, Tensor) else v, new)
        self._before = []
        self._lists = [(each, old) for each, old in self._lists if not _are_same(each, old)]
        for each, old in self._lists:
            each[:] = [mark(new) if isinstance(new, Tensor) and not _is_in(new, old) else new for new in each]
        self._generators = [(each, state) for each, state in self._generators if _differ(state, _get_state(each))]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Be as before the forward; afterwards as now.

        Yields:
            None: As long as everything is as it was.
        """
        now = [(module, name, _get(module, name)) for module, name, _ in self._changes]
        states = [(each, _get_state(each)) for each, _ in self._generators]
        lists = [(each, list(each)) for each, _ in self._lists]
        try:
            _put(self._changes, self._generators, self._lists)
            yield
        finally:
            _put(now, states, lists)


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {name: value for name, value in module.__dict__.items() if name not in _EVERY}
    return found | {name: None for name, value in module._buffers.items() if value is None}  # noqa: SLF001 - no other way


def _get(module: nn.Module, name: str) -> Any:
    buffers = module._buffers  # noqa: SLF001 - one may be or have been None, and those have no public list
    return buffers[name] if name in buffers else module.__dict__.get(name, _MISSING)


def _put(
    attributes: Iterable[tuple[nn.Module, str, Any]],
    generators: Iterable[tuple[Any, Any]],
    lists: Iterable[tuple[list[Any], list[Any]]],
) -> None:
    for module, name, value in attributes:
        if name in module._buffers:  # noqa: SLF001 - as above
            module._buffers[name] = value  # noqa: SLF001 - as above
        elif value is _MISSING:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    for each, state in generators:
        _set_state(each, state)
    for filled, contents in lists:
        filled[:] = contents


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


def _get_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _differ(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, Tensor) else repr(one) != repr(other)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _is_in(value: Any, values: list[Any]) -> bool:
    return any(value is each for each in values)
