"""Attribution of autograd nodes to modules, by the sequence number that autograd assigns in the forward.

Autograd numbers the nodes of a thread in the order of their creation. This module records the counter at each module's
entry and exit; a number in between belongs to that module, the innermost of several. ``FlopCounterMode`` instead
credits modules that share an input with each other's backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import Node

from sparsebp_cli.backward.observe.internals import (
    current_pass,
    forward_hooks_of,
    next_sequence_number,
    sequence_number_of,
)
from sparsebp_cli.backward.patch.forward import NotCopyable

# A model of a few hundred modules makes a thousand records per forward, so this stores at least the last 100 forwards.
MOST_RECORDS = 200_000


class Attribution:
    """Records sequence numbers at every module's entry and exit, until its hooks are removed.

    Several forwards may precede one backward (accumulation, two losses), so records accumulate, up to a limit. Forwards
    that rerun inside a backward (activation checkpointing) are not recorded: the graph consists of the nodes of the
    first run, and the numbers of a device's own backward thread would collide with theirs. Each module gets two hooks;
    parameters and state_dict keys do not change. The hooks call ``at_exit`` with the output of each outermost module.
    """

    def __init__(self, model: nn.Module, at_exit: Callable[[object], None] | None = None) -> None:
        self.name: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._at_exit = at_exit
        self._starts: list[int] = []  # ascending; between one number and the next the innermost module is the same
        self._names: list[str | None] = []
        self._open: list[str] = []
        self._handles = []
        for module, name in self.name.items():
            self._handles.append(module.register_forward_pre_hook(_Entry(self.enter, name)))
            # always_call, so that a caught error, such as out of memory, leaves no module open.
            leave = _Exit(self.leave, name, is_watched=at_exit is not None)
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def current(self) -> str:
        """The innermost module whose forward is running; empty for the model itself and outside of it."""
        return self._open[-1] if self._open else ""

    def name_at(self, number: int) -> str | None:
        """Return the innermost module that was running when autograd assigned a sequence number.

        Empty for the model itself; None outside of the model.
        """
        place = bisect_right(self._starts, number) - 1
        return self._names[place] if place >= 0 else None

    def name_of(self, node: Node) -> str | None:
        """Return the innermost module that created a node, which must not be a leaf; see :meth:`name_at`."""
        return self.name_at(sequence_number_of(node))

    def enter(self, name: str) -> None:
        """Record that a module's forward begins."""
        self._open.append(name)
        self._note(name)

    def leave(self, name: str, output: object) -> None:
        """Record that a module's forward has ended; ``output`` is None after an error."""
        while self._open and self._open.pop() != name:  # also close inner modules whose exit was not recorded
            pass
        self._note(self._open[-1] if self._open else None)
        if self._at_exit is not None and not self._open:
            self._at_exit(output)

    def _note(self, name: str | None) -> None:
        number = next_sequence_number()
        if self._starts and self._starts[-1] > number:  # the forward moved to another thread, with its own counter
            self._starts, self._names = [], []
        if self._starts and self._starts[-1] == number:  # autograd has created no node since
            self._names[-1] = name
        else:
            self._starts.append(number)
            self._names.append(name)
        if len(self._starts) > MOST_RECORDS:
            del self._starts[: MOST_RECORDS // 2], self._names[: MOST_RECORDS // 2]


def is_watched(module: nn.Module) -> bool:
    """Return whether an engine watches the output of a module."""
    return any(isinstance(hook, _Exit) and hook.is_watched for hook in forward_hooks_of(module))


class _Hook(NotCopyable):
    """One hook of one module. An object instead of a function, so that copying the model can be refused."""

    def __init__(self, call: Callable[..., None], name: str) -> None:
        self._call, self._name = call, name


class _Entry(_Hook):
    """Hook before a module's forward."""

    def __call__(self, *_: object) -> None:
        if not is_left_out():
            self._call(self._name)


class _Exit(_Hook):
    """Hook after a module's forward, also if it raised; the output is then None."""

    def __init__(self, call: Callable[..., None], name: str, *, is_watched: bool) -> None:
        super().__init__(call, name)
        self.is_watched = is_watched

    def __call__(self, _module: nn.Module, _args: object, output: object) -> None:
        if not is_left_out():
            self._call(self._name, output)


def is_left_out() -> bool:
    """Return whether nodes created now cannot be attributed: under torch.compile, and in a backward."""
    # A compiled module is a single node. A forward inside a backward pass repeats an earlier one.
    return torch.compiler.is_compiling() or current_pass() is not None
