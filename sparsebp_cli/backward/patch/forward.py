"""Overrides of a module's forward while a model is attached. All of the engine's overrides are installed here.

A module's own forward belongs to its class. An override is an entry ``forward`` in the module's instance dictionary, so
class, parameters and state_dict keys do not change, and removing the entry restores the module.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn

from sparsebp_cli.errors import UnsupportedError, UsageError

Forward: TypeAlias = Callable[..., object]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class NotCopyable:
    """An object that an attached model refers to. It refuses copies, which would act on the original model's engine."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise UnsupportedError("an attached model cannot be copied or pickled: call engine.detach() first")


class ForwardOverride(NotCopyable, ABC):
    """A module's ``forward`` while an engine is attached; :class:`ForwardPatches` installs it and sets its attributes.

    Another library may wrap the override (accelerate wraps the whole model's) and still call it after its removal. So
    once ``is_removed`` is set, :meth:`__call__` must run the module as without an engine.

    Attributes:
        covered: The module's earlier forward, of an engine or another library; None: its class's forward.
        is_removed: Whether the engine was detached.
    """

    covered: Callable[..., object] | None = None  # the instance's earlier forward; None: its class's forward
    is_removed = False
    __signature__: inspect.Signature

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any, so that each override has its module's own signature
        """Run the module."""

    def run_covered(self, module: nn.Module, *args: object, **kwargs: object) -> Any:
        """Run the module without this override.

        Args:
            module: The module of this override.
            *args: Positional arguments of its own forward.
            **kwargs: Keyword arguments of its own forward.

        Returns:
            The result of its own forward.
        """
        return call_module(module, *args, **kwargs) if self.covered is None else self.covered(*args, **kwargs)


class ModuleOverride(ForwardOverride):
    """An override of a part of a model that decides by its arguments, so that a copy is the module's plain forward."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __reduce_ex__(self, _: object) -> Any:
        """Pickle as the plain forward of the module."""
        return partial, (type(self.module).forward, self.module)


class CheckpointedForward(ForwardOverride):
    """An override that runs inside its module's activation checkpointing, and again when checkpointing reruns it.

    Before transformers 5.24, a layer called its forward inside checkpointing. Since then its class's forward contains
    the checkpointing, which would rerun without the override.
    """

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module: Any = self._module
        is_on = module.gradient_checkpointing and module.training and torch.is_grad_enabled()
        if not is_on or id(module) in _checkpointed.get():
            return self._forward(*args, **kwargs)
        if not getattr(module, "_can_checkpoint_with_cache", False):  # as its class does
            kwargs |= {name: None for name in ("cache", "layer_past") if name in kwargs}
            kwargs |= {name: False for name in ("use_cache",) if name in kwargs}
        return module._gradient_checkpointing_func(partial(self._run, **kwargs), *args)  # noqa: SLF001

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy like the inner override: some overrides give a copy of the model its plain forward."""
        return self._forward.__reduce_ex__(protocol)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        token = _checkpointed.set(_checkpointed.get() | {id(self._module)})
        try:
            return self._forward(*args, **kwargs)
        finally:
            _checkpointed.reset(token)


_checkpointed: ContextVar[frozenset[int]] = ContextVar("checkpointed", default=frozenset())  # modules that are running


def checkpoints_in_forward(module: nn.Module) -> bool:
    """Return whether a module's class has checkpointing inside its forward, like layers since transformers 5.24."""
    base = next((kind for kind in type(module).__mro__ if kind.__name__ == "GradientCheckpointingLayer"), None)
    return base is not None and "__call__" not in vars(base)


class ForwardPatches:
    """The forwards that one adapter or extension has overridden.

    Under activation checkpointing an override runs inside it, and again when the module reruns.
    """

    def __init__(self) -> None:
        # (module, the given forward, its forward now, its forward before).
        self._installed: list[tuple[nn.Module, Forward, Forward, Forward | None]] = []

    def install(self, module: nn.Module, forward: Callable[..., object]) -> None:
        """Override a module's forward.

        Args:
            module: A module of the model. Its class, parameters and keys of ``state_dict`` do not change.
            forward: The replacement. A :class:`ForwardOverride` can run the earlier forward.
        """
        covered = module.__dict__.get("forward")
        if isinstance(forward, ForwardOverride):
            forward.covered = covered
            # transformers' generate reads the signature: without position_ids it would miscount left padding.
            forward.__signature__ = inspect.signature(module.forward)
        installed = CheckpointedForward(module, forward) if checkpoints_in_forward(module) else forward
        self._installed.append((module, forward, installed, covered))
        module.forward = installed

    def remove(self) -> None:
        """Restore all forwards, the latest first. Leave a forward that another library has wrapped since in place."""
        while self._installed:
            module, forward, installed, covered = self._installed.pop()
            for override in (forward, installed):
                if isinstance(override, ForwardOverride):
                    override.is_removed = True
            if module.__dict__.get("forward") is not installed:  # deleting it would drop the other library's wrapper
                continue
            if covered is None:
                del module.__dict__["forward"]
            else:
                module.forward = covered


@contextmanager
def replace_forwards(replacements: Iterable[tuple[nn.Module, Callable[..., object]]]) -> Iterator[None]:
    """Let modules run other functions inside the block."""
    patches = ForwardPatches()
    try:
        for module, forward in replacements:
            patches.install(module, forward)
        yield
    finally:
        patches.remove()


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a function that runs outside of ``torch.compile``, even if compiled code calls it."""
    # Use torch.compiler, since importing torch._dynamo takes seconds. Its functions have no types.
    result: Callable[_Arguments, _Result] = torch.compiler.disable(function)
    return result


def call_module(module: nn.Module, *args: object, **kwargs: object) -> Any:
    """Run a module by its class's forward, without overrides and without activation checkpointing of the module."""
    forward: Callable[..., Any] = type(module).forward
    if checkpoints_in_forward(module):
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward(module, *args, **kwargs)


def check_free(name: str, module: nn.Module) -> None:
    """Raise :class:`UnsupportedError` if a module's forward is overridden, by an engine or by another library."""
    current = module.__dict__.get("forward")
    if isinstance(current, ForwardOverride):
        raise UnsupportedError(f"the model is already attached (at {name!r}): call detach() of its engine first")
    if current is not None:
        own = getattr(current, "__qualname__", type(current).__name__)  # the repr of a method includes its module's
        raise UnsupportedError(
            f"the forward of {name!r} was replaced ({own}): exclude the module, or remove the replacement"
        )


class ModulePlaces:
    """The modules of a model at attach. Overrides and decisions refer to these, so a replaced module is an error.

    Examples are a new head or resized embeddings. Wrappers are not replacements: ``torch.compile`` of a layer,
    activation checkpointing, an adapter around a linear.
    """

    def __init__(self, model: nn.Module) -> None:
        # Store the dictionaries themselves, since looking up a module by its path takes ten times as long.
        self._places = [
            (parent._modules, child, module, f"{name}.{child}".lstrip("."))  # noqa: SLF001 - named_children are copies
            for name, parent in model.named_modules()
            for child, module in parent._modules.items()  # noqa: SLF001
        ]

    def check(self) -> None:
        """Raise :class:`UsageError` if a module was replaced."""
        for modules, child, module, name in self._places:
            now = modules.get(child)
            if now is not module and (now is None or all(inner is not module for inner in now.modules())):
                raise UsageError(
                    f"{name!r} was replaced after the model was attached: call engine.detach(), change the model, "
                    "make a new optimizer, and attach again"
                )
