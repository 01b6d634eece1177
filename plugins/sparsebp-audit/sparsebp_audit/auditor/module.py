"""Name the running module of any model; modules are discovered when they run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from sparsebp_audit.auditor.hook import FunctionPatches
from sparsebp_cli.backward.observe.attribution import is_left_out
from sparsebp_cli.backward.observe.internals import is_compiled
from sparsebp_cli.backward.observe.module_trace import ModuleTrace

# Names under which wrappers hold a module; module names omit them.
WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class AnyModules(ModuleTrace):
    """Name the running module, for every model that this process calls.

    While entered, it replaces ``nn.Module.__call__``, because global module hooks do not get keyword arguments.
    ``at_root`` is called before the forward of an outermost module, with the module, its arguments and keyword
    arguments, and ``after_root`` with its output.
    """

    has_compiled: bool

    def __init__(
        self,
        at_root: Callable[[nn.Module, tuple[object, ...], dict[str, object]], None],
        after_root: Callable[[nn.Module, object], None] = lambda _module, _output: None,
    ) -> None:
        super().__init__(nn.Module())
        self._at_root, self._after_root = at_root, after_root
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: set[str] = set()
        self._patches = FunctionPatches()
        self.has_compiled = False

    def __enter__(self) -> AnyModules:
        """Replace the call of modules."""
        super().__enter__()
        self._is_entered = True
        self._patches.replace(nn.Module, "__call__", self._watch_calls)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Restore it."""
        self._is_entered = False
        self._patches.restore()
        super().__exit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block without recording the modules that it calls."""
        self._is_entered = False
        try:
            yield
        finally:
            self._is_entered = True

    def add_root(self, root: nn.Module) -> bool:
        """Name a root model and its modules, but keep earlier names; return whether the root is new."""
        if root in self._names:
            return False
        label = ""
        if self._roots:
            label = kind = type(root).__name__
            count = 1
            while label in self._roots:
                count += 1
                label = f"{kind}-{count}"
        elif next(root.parameters(), None) is None:
            label = type(root).__name__
        self._roots.add(label or "model")
        for name, module in root.named_modules():
            own = [part for part in name.split(".") if part and part not in WRAPPED]
            self.has_compiled |= hasattr(module, "_orig_mod") or is_compiled(module)
            self._names.setdefault(module, ".".join([label, *own] if label else own))
        return True

    def known(self) -> list[nn.Module]:
        """Return every module seen so far."""
        return list(self._names)

    def name_of(self, module: nn.Module) -> str:
        """Return a module's name; empty for the model itself."""
        return self._names.get(module, "")

    def has_no_parameters(self, module: nn.Module) -> bool:
        """Return whether a module has no parameters, such as a loss."""
        return next(module.parameters(), None) is None

    def _watch_calls(self, call: Callable[..., object]) -> Callable[..., object]:
        enter, leave = self._enter_module, self._leave_module

        @functools.wraps(call)
        def watched(module: nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or not self._is_entered:
                return call(module, *args, **kwargs)
            name = enter(module, args, kwargs)
            try:
                output = call(module, *args, **kwargs)
            finally:
                leave(name)
            if not self.is_running:
                self._after_root(module, output)
            return output

        return watched

    def _enter_module(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        if not self.is_running:
            self._at_root(module, args, kwargs)
        elif module not in self._names:
            self._names[module] = type(module).__name__  # created inside a forward
        name = self._names[module]
        if not is_left_out():
            self._graph.enter(name)
        self.enter(name)
        return name

    def _leave_module(self, name: str) -> None:
        if not is_left_out():
            self._graph.leave(name, None)
        self.leave()
