"""The state on which a forward depends besides its arguments, saved to run the forward again.

It includes the random generators of PyTorch, Python and numpy (layers may use any of them), autocast, buffers and
other module state, and which modules are training.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.execution.segment.module_state import ModuleState
from sparsebp_cli.backward.observe.internals import version_of
from sparsebp_cli.backward.patch.rng import capture_generators, generators_at


@dataclass
class _Buffer:
    """One buffer of a module at the beginning of the forward."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int  # counts changes in place
    value: Tensor  # a copy

    @property
    def is_changed(self) -> bool:
        """Return whether the module has changed the buffer since, in place or by assigning another tensor."""
        if getattr(self.module, self.name, None) is not self.tensor or version_of(self.tensor) != self.version:
            return True
        return not torch.equal(self.tensor, self.value)  # batch norm writes without increasing the version


# States of Python's generator, in the form for ``setstate``, and of numpy's.
HostStates = tuple[tuple[Any, ...], bytes]


class ForwardContext:
    """Context of a forward, saved when this object is created, just before the forward.

    ``modules`` will run; ``tensors`` are their arguments. Generators of the devices of both are saved.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> None:
        inner = {id(m): m for module in modules for m in module.modules()}.values()
        devices = {t.device for t in tensors} | {p.device for m in inner for p in m.parameters(recurse=False)}
        kinds = {device.type for device in devices} | {"cpu"}
        self._generators = {device: capture_generators(device) for device in devices or {torch.device("cpu")}}
        # Autocast does not support the meta device.
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds - {"meta"}]
        self._buffers = [
            _Buffer(module, name, tensor, version_of(tensor), tensor.detach().clone())
            for module in inner
            for name, tensor in (*module.named_buffers(recurse=False), *_tensors(module))
        ]
        self._state = ModuleState(inner)
        self._training = [(module, module.training) for module in inner]
        self._host: HostStates | None = _get_host()

    def keep_changes(self, guard: Callable[[Tensor], Tensor]) -> None:
        """Drop state that the completed forward did not change; ``guard`` as in :meth:`ModuleState.keep_changes`."""
        self._buffers = [buffer for buffer in self._buffers if buffer.is_changed]
        self._state.keep_changes(guard)
        if self._host == _get_host():
            self._host = None

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Run with the current autocast, but without its cache.

        A weight cast in a forward without a graph would be cached without one, and the second run would reuse it.
        """
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved context for a second run of the forward, and the present one afterwards."""
        now = [(buffer, getattr(buffer.module, buffer.name, None)) for buffer in self._buffers]
        switched = [(module, module.training) for module, was in self._training if module.training != was]
        host = None if self._host is None else _get_host()
        with ExitStack() as stack:
            stack.enter_context(self.without_cache())
            stack.enter_context(self._state.restored())
            for device, states in self._generators.items():
                stack.enter_context(generators_at(states, device))
            try:
                for buffer, _ in now:
                    # Copy, since the second run may write into it, and exact clipping runs a backward twice.
                    setattr(buffer.module, buffer.name, buffer.value.clone())
                for module, is_training in switched:
                    module.training = not is_training
                _put_host(self._host)
                yield
            finally:
                for buffer, tensor in now:
                    setattr(buffer.module, buffer.name, tensor)
                for module, is_training in switched:
                    module.training = is_training
                _put_host(host)


class Versions:
    """Tensors that must not change in place, because a second run of the forward starts from them."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Tensor, int]] = {}

    def note(self, tensor: Tensor) -> None:
        """Record a tensor's version."""
        self._noted.setdefault(id(tensor), (tensor, version_of(tensor)))

    def find_changed(self) -> Tensor | None:
        """Return a tensor that changed since it was recorded, if any."""
        return next((tensor for tensor, version in self._noted.values() if version_of(tensor) != version), None)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return tensor attributes that are not buffers but may change in place as well."""
    return [(name, value) for name, value in module.__dict__.items() if isinstance(value, Tensor)]


def _get_host() -> HostStates:
    """Return the states of Python's generator and of numpy's, so that they can be compared."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def _put_host(states: HostStates | None) -> None:
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(pickle.loads(states[1]))
