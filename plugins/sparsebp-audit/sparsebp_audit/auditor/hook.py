"""Count calls, time and visited parameters of hooks that the user or a library has registered."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsebp_audit.auditor.internals import without_torch_functions

F = TypeVar("F")
Named = Iterator[tuple[str, nn.Parameter]]
_CLOCKED = "is_clocked"


class FunctionPatches:
    """Replace attributes of modules and classes, and restore them."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, make: Callable[[F], F]) -> F:
        """Replace the function ``name`` of a module or class by ``make(old)``, and return the old one."""
        old: F = getattr(owner, name)
        self._before.append((owner, name, old))
        setattr(owner, name, make(old))
        return old

    def restore(self) -> None:
        """Restore all functions, the latest first."""
        while self._before:
            owner, name, old = self._before.pop()
            setattr(owner, name, old)


_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OURS = ("sparsebp_cli", "torch", "accelerate")  # hooks of these libraries are not findings


@dataclass
class HookCount:
    """Counts of hooks that run the same code."""

    name: str  # name of their function
    hooks: int = 0
    calls: int = 0
    seconds: float = 0.0
    visits: int = 0  # parameters visited, over all calls


@dataclass
class Hooks:
    """Wrap registered hooks with counters, and unwrap them again; ``counts`` is by the hook function's name."""

    counts: dict[str, HookCount] = field(default_factory=dict)
    _replaced: list[tuple[MutableMapping[int, object], int, object, object]] = field(default_factory=list)
    _running: list[set[int]] = field(default_factory=list)
    _patches: FunctionPatches = field(default_factory=FunctionPatches)

    def start(self) -> None:
        """Count iterations over the parameters of a module."""

        def make(named_parameters: Callable[..., Named]) -> Callable[..., Named]:
            @functools.wraps(named_parameters)
            def counted(module: nn.Module, *args: object, **kwargs: object) -> Named:
                for name, parameter in named_parameters(module, *args, **kwargs):
                    if self._running:
                        self._running[-1].add(id(parameter))
                    yield name, parameter

            return counted

        self._patches.replace(nn.Module, "named_parameters", make)

    def stop(self) -> None:
        """Restore everything."""
        self._patches.restore()
        for hooks, number, clocked, original in self._replaced:
            # Leave a hook alone if other code has replaced it since.
            if hooks.get(number) is clocked:
                hooks[number] = original
        self._replaced.clear()

    def wrap_hooks(self, modules: list[nn.Module], parameters: list[Tensor]) -> None:
        """Wrap every hook of these modules and parameters that is not wrapped yet."""
        for owners, names in ((modules, _OF_MODULES), (parameters, OF_PARAMETERS)):
            for owner in owners:
                for name in names:
                    hooks = getattr(owner, name, None)
                    for number, hook in list((hooks or {}).items()):
                        if hooks is not None and not _is_left_out(hook):
                            hooks[number] = clocked = self._clock(hook)
                            self._replaced.append((hooks, number, clocked, hook))

    def _clock(self, hook: Callable[..., object]) -> Callable[..., object]:
        name = _name(hook)
        count = self.counts.setdefault(name, HookCount(name))
        count.hooks += 1

        def clocked(*args: object, **kwargs: object) -> object:
            visited: set[int] = set()
            self._running.append(visited)
            start = time.perf_counter()
            try:
                with _Visits(visited):
                    return hook(*args, **kwargs)
            finally:
                count.seconds += time.perf_counter() - start
                self._running.pop()
                count.calls += 1
                count.visits += len(visited)

        functools.update_wrapper(clocked, hook, assigned=("__name__", "__doc__"), updated=())
        setattr(clocked, _CLOCKED, True)
        return clocked


class _Visits(TorchFunctionMode):
    """Record the parameters that any function is called with; reading ``.grad`` is such a call."""

    def __init__(self, visited: set[int]) -> None:
        super().__init__()
        self._visited = visited

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with without_torch_functions():
            for value in args:
                if isinstance(value, nn.Parameter):
                    self._visited.add(id(value))
        return func(*args, **(kwargs or {}))


def _is_left_out(hook: object) -> bool:
    if getattr(hook, _CLOCKED, False) or isinstance(hook, torch.utils.hooks.RemovableHandle):
        return True
    module = getattr(_function(hook), "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] in _OURS


def _function(hook: object) -> object:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name(hook: object) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace(".<locals>", "").removesuffix(".<lambda>")
