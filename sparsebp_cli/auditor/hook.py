"""Hooks of somebody else's: how often they run, how long they take, and how many parameters each call goes through."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OURS = ("sparsebp_cli", "torch", "accelerate")  # libraries' own hooks are part of how they work


@dataclass
class HookCount:
    """Hooks that run the same code.

    Args:
        name: Of their function.
        hooks: How many there are.
        calls: How often they ran.
        seconds: In them.
        visits: Parameters that they went through, over all calls.
    """

    name: str
    hooks: int = 0
    calls: int = 0
    seconds: float = 0.0
    visits: int = 0


@dataclass
class Hooks:
    """Puts a clock around hooks that are registered, and takes it away again.

    Args:
        counts: By the hooks' code.
    """

    counts: dict[str, HookCount] = field(default_factory=dict)
    _replaced: list[tuple[MutableMapping[int, Any], int, Any, Any]] = field(default_factory=list)
    _running: list[set[int]] = field(default_factory=list)
    _before: Callable[..., Any] | None = None

    def start(self) -> None:
        """Count who goes through the parameters of a module."""
        self._before = named_parameters = nn.Module.named_parameters

        @functools.wraps(named_parameters)
        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for name, parameter in named_parameters(module, *args, **kwargs):
                if self._running:
                    self._running[-1].add(id(parameter))
                yield name, parameter

        nn.Module.named_parameters = counted  # type: ignore[method-assign,assignment]

    def stop(self) -> None:
        """Put everything back."""
        if self._before is not None:
            nn.Module.named_parameters = self._before  # type: ignore[method-assign]
        for hooks, number, clocked, original in self._replaced:
            if hooks.get(number) is clocked:
                hooks[number] = original
        self._replaced.clear()

    def look_at(self, modules: list[nn.Module], parameters: list[Tensor]) -> None:
        """Put a clock around every hook that has none yet.

        Args:
            modules: Whose hooks.
            parameters: Whose hooks.
        """
        for owners, names in ((modules, _OF_MODULES), (parameters, _OF_PARAMETERS)):
            for owner in owners:
                for name in names:
                    hooks = getattr(owner, name, None)
                    for number, hook in list((hooks or {}).items()):
                        if hooks is not None and not _is_left_out(hook):
                            hooks[number] = clocked = self._clock(hook)
                            self._replaced.append((hooks, number, clocked, hook))

    def _clock(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        name = _name(hook)
        count = self.counts.setdefault(name, HookCount(name))
        count.hooks += 1

        def clocked(*args: Any, **kwargs: Any) -> Any:
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
        clocked.is_clocked = True  # type: ignore[attr-defined]
        return clocked


class _Visits(TorchFunctionMode):
    """Notes parameters that anything is asked of, their ``.grad`` as well."""

    def __init__(self, visited: set[int]) -> None:
        super().__init__()
        self._visited = visited

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what the public class uses
            for value in args:
                if isinstance(value, nn.Parameter):
                    self._visited.add(id(value))
        return func(*args, **(kwargs or {}))


def _is_left_out(hook: Any) -> bool:
    if getattr(hook, "is_clocked", False) or isinstance(hook, torch.utils.hooks.RemovableHandle):
        return True
    module = getattr(_function(hook), "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] in _OURS


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _name(hook: Any) -> str:
    function = _function(hook)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace(".<locals>", "").removesuffix(".<lambda>")
