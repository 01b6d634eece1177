"""Module state besides parameters and buffers: attributes, tensors, random generators and lists."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparsebp_cli.backward.execution.segment.arguments import are_same, holds_tensor
from sparsebp_cli.backward.observe.internals import buffers_of

_EVERY = frozenset(nn.Module().__dict__) | {"forward"}  # attributes of every module, and the engine's override
_MISSING = object()
_Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


class ModuleState:
    """The state of modules and their children, saved when this object is created, just before the forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, _attributes(module)) for module in modules]
        values = [value for _, attributes in self._before for value in attributes.values()]
        self._generators = [(each, _get_state(each)) for each in values if _is_generator(each)]
        self._lists = [(each, list(each)) for each in values if isinstance(each, list)]
        self._changes: list[tuple[nn.Module, str, object]] = []

    def keep_changes(self, guard: Callable[[Tensor], Tensor]) -> None:
        """Drop state that the completed forward did not change.

        ``guard`` makes a tensor that a module has newly stored refuse gradients, since it was computed without a graph.
        """
        for module, before in self._before:
            after = _attributes(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name, _MISSING), after.get(name, _MISSING)
                if old is not new:
                    self._changes.append((module, name, old.detach() if isinstance(old, Tensor) else old))
                    place, names = module.__dict__, [name]
                    if not isinstance(new, Tensor | list | tuple | dict):
                        place = getattr(new, "__dict__", {})
                        names = [key for key, value in place.items() if holds_tensor(value)]
                    for key in names:
                        place[key] = tree_map(lambda v: guard(v) if isinstance(v, Tensor) else v, place[key])
        self._before = []
        self._lists = [(each, old) for each, old in self._lists if not are_same(each, old)]
        for each, old in self._lists:
            each[:] = [guard(new) if isinstance(new, Tensor) and not _is_in(new, old) else new for new in each]
        self._generators = [(each, state) for each, state in self._generators if _differ(state, _get_state(each))]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state from before the forward, and the present one afterwards."""
        now = [(module, name, _get(module, name)) for module, name, _ in self._changes]
        states = [(each, _get_state(each)) for each, _ in self._generators]
        lists = [(each, list(each)) for each, _ in self._lists]
        try:
            _put(self._changes, self._generators, self._lists)
            yield
        finally:
            _put(now, states, lists)


def _attributes(module: nn.Module) -> dict[str, object]:
    found = {name: value for name, value in module.__dict__.items() if name not in _EVERY}
    return found | {name: None for name, value in buffers_of(module).items() if value is None}


def _get(module: nn.Module, name: str) -> object:
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else module.__dict__.get(name, _MISSING)


def _put(
    attributes: Iterable[tuple[nn.Module, str, object]],
    generators: Iterable[tuple[_Generator, object]],
    lists: Iterable[tuple[list[object], list[object]]],
) -> None:
    for module, name, value in attributes:
        buffers = buffers_of(module)
        if name in buffers:
            assert value is None or isinstance(value, Tensor)
            buffers[name] = value
        elif value is _MISSING:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
    for each, state in generators:
        _set_state(each, state)
    for filled, contents in lists:
        filled[:] = contents


def _is_generator(value: object) -> TypeGuard[_Generator]:
    return isinstance(value, _Generator)


def _get_state(generator: _Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: _Generator, state: Any) -> None:  # the state's type depends on the kind of generator
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _differ(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    # Compare as text, since states contain arrays, whose == has no single truth value. repr shows all 624 numbers.
    return repr(one) != repr(other)


def _is_in(value: object, values: list[object]) -> bool:
    return any(value is each for each in values)
