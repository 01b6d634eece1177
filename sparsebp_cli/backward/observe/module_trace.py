"""Tracking of the running module, in forward, backward, and forwards repeated inside a backward.

:class:`~sparsebp_cli.backward.observe.attribution.Attribution` covers the nodes of a forward's own graph. A backward
may run modules as well: activation checkpointing recomputes their inputs, and sparse recompute builds a graph of them
and differentiates it immediately. The thread that runs the backward numbers the nodes of such an inner graph, and on an
accelerator it has its own counter. So this module records them separately. A node belongs to an inner graph if an inner
pass runs it; passes inside another have their own id.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from types import TracebackType
from typing import Self

from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from sparsebp_cli.backward.observe.attribution import Attribution
from sparsebp_cli.backward.observe.internals import (
    call_after_pass,
    current_pass,
    next_sequence_number,
    running_node,
    sequence_number_of,
)


class _ThreadState(threading.local):
    """State of one thread: the running modules, and sequence numbers at their entries and exits inside a backward."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.starts: list[int] = []
        self.names: list[str | None] = []
        self.outer = ""  # module of the latest node of the outer graph


class ModuleTrace:
    """Tracks which module is running, so that counts can be split by module. A context manager: run forward and
    backward inside it.

    Args:
        model: The model. It has hooks during the block; its parameters and state_dict keys do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._thread = model, _ThreadState()
        self._passes: list[int] = []  # ids of active backward passes, the outer one first
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Install the hooks."""
        self._graph = Attribution(self._model)
        for name, module in self._model.named_modules():
            enter, leave = _Entry(self, name), _Exit(self)
            self._handles.append(module.register_forward_pre_hook(enter))
            # always_call, because checkpointing ends a repeated forward early by an exception.
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks."""
        self._graph.remove()
        for handle in self._handles:
            handle.remove()
        self._handles, self._passes = [], []

    @property
    def is_running(self) -> bool:
        """Whether a module's forward is running in this thread."""
        return bool(self._thread.running)

    @property
    def current(self) -> str:
        """The name of the innermost module whose forward is running; else of the module that created the running node.

        It is empty for the model itself and for nodes without a module.
        """
        state = self._thread
        if state.running:
            return state.running[-1]
        node = running_node()
        if node is None:
            return ""
        number = sequence_number_of(node)
        if self._is_inner_pass():
            place = bisect_right(state.starts, number) - 1
            return (state.names[place] if place >= 0 else None) or state.outer
        state.outer = self._graph.name_at(number) or ""
        return state.outer

    def module_of(self, node: Node) -> str | None:
        """Return the innermost module whose forward created a node of the graph; None outside of the model."""
        return self._graph.name_of(node)

    def enter(self, name: str) -> None:
        """Record that a module's forward begins in this thread."""
        if is_in_backward() and not self._thread.running:
            _ = self.current  # updates `outer`, which inner nodes outside of any module are attributed to
        self._thread.running.append(name)
        self._note()

    def leave(self) -> None:
        """Record that the innermost module's forward has ended."""
        if self._thread.running:  # empty if the block was entered inside of the forward
            self._thread.running.pop()
        self._note()

    def _note(self) -> None:
        if not is_in_backward():
            return
        state = self._thread
        # The nodes of a forward have the numbers between its entry and its exit. See decision 4.
        state.starts.append(next_sequence_number())
        state.names.append(state.running[-1] if state.running else None)

    def _is_inner_pass(self) -> bool:
        this = current_pass()
        if this is None:  # the node was called directly, not by the engine
            return False
        if this not in self._passes:
            self._passes.append(this)
            call_after_pass(lambda: self._end(this))
        return self._passes[0] != this

    def _end(self, number: int) -> None:
        if number in self._passes:
            self._passes.remove(number)


def is_in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return current_pass() is not None


class _Entry:
    def __init__(self, trace: ModuleTrace, name: str) -> None:
        self._trace, self._name = trace, name

    def __call__(self, *_: object) -> None:
        self._trace.enter(self._name)


class _Exit:
    def __init__(self, trace: ModuleTrace) -> None:
        self._trace = trace

    def __call__(self, *_: object) -> None:
        self._trace.leave()
