"""Which module a node of the autograd graph belongs to, by the sequence number that autograd gave it in the forward.

Every node takes the next number of its thread when it is made. What the counter says at a module's entry and exit is
noted, and a number between them belongs to that module; of several the innermost. ``FlopCounterMode`` credits modules
that share an input with each other's backward; numbers cannot be mixed up. Both names, ``_get_sequence_nr`` and
``Node._sequence_nr``, are private to PyTorch: the tests hold them for the installed release.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from sparsebp_cli.errors import UnsupportedError

# A model of a few hundred modules makes a thousand notes a forward pass: so the last hundred passes are known.
MOST_NOTES = 200_000


class Attribution:
    """Notes sequence numbers at every module's entry and exit, as long as its hooks are there.

    A forward pass adds to what is known, so several of them may stand before one backward (accumulation, two losses);
    the oldest are forgotten in the end.
    What a backward pass runs again (activation checkpointing) is left out: the nodes of the first run are the graph's,
    and the numbers of a device's own backward thread would collide with them.

    Args:
        model: Gets two hooks a module; its parameters and state_dict keys stay as they are.
        at_exit: Called with the output of each outermost module, such as to watch its gradient; None: nobody.

    Attributes:
        name: Of the model's modules, by module; a module that is shared has its first name.
    """

    def __init__(self, model: nn.Module, at_exit: Callable[[Any], None] | None = None) -> None:
        self.name = {module: name for name, module in model.named_modules()}
        self._at_exit = at_exit
        self._starts: list[int] = []  # ascending; from each number to the next one everything has one innermost module
        self._names: list[str | None] = []
        self._open: list[str] = []
        self._handles = []
        for module, name in self.name.items():
            self._handles.append(module.register_forward_pre_hook(_Entry(self.enter, name)))
            # Also after an error, so that a caught one (out of memory) leaves no module open.
            leave = _Exit(self.leave, name, is_watched=at_exit is not None)
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def current(self) -> str:
        """The innermost module whose forward is running now; empty for the model itself and outside of it."""
        return self._open[-1] if self._open else ""

    def name_at(self, number: int) -> str | None:
        """Return the innermost module that was running when autograd gave this number.

        Args:
            number: A sequence number, such as ``torch._C._current_autograd_node()._sequence_nr()`` in a backward pass.

        Returns:
            The module's name, empty for the model itself; None outside of the model.
        """
        place = bisect_right(self._starts, number) - 1
        return self._names[place] if place >= 0 else None

    def name_of(self, node: Node) -> str | None:
        """Return the innermost module that made a node.

        Args:
            node: Of a graph that the model's forward made; not a leaf.

        Returns:
            The module's name, empty for the model itself; None outside of the model.
        """
        return self.name_at(node._sequence_nr())  # noqa: SLF001 - the module's docstring

    def enter(self, name: str) -> None:
        """Note that a module's forward begins.

        Args:
            name: The module's.
        """
        self._open.append(name)
        self._note(name)

    def leave(self, name: str, output: Any) -> None:
        """Note that a module's forward has ended.

        Args:
            name: The module's.
            output: What it returned; None after an error.
        """
        while self._open and self._open.pop() != name:  # those inside that had no exit
            pass
        self._note(self._open[-1] if self._open else None)
        if self._at_exit is not None and not self._open:
            self._at_exit(output)

    def _note(self, name: str | None) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001
        if self._starts and self._starts[-1] > number:  # another thread, which counts on its own
            self._starts, self._names = [], []
        if self._starts and self._starts[-1] == number:  # nothing was made since
            self._names[-1] = name
        else:
            self._starts.append(number)
            self._names.append(name)
        if len(self._starts) > MOST_NOTES:
            del self._starts[: MOST_NOTES // 2], self._names[: MOST_NOTES // 2]


def is_watched(module: nn.Module) -> bool:
    """Return whether somebody watches the output of a module itself."""
    hooks = module._forward_hooks.values()  # noqa: SLF001 - there is no other way to ask
    return any(isinstance(hook, _Exit) and hook.is_watched for hook in hooks)


class _Hook:
    """One hook of one module. An object and not a function, so that a copy of the model is refused.

    Args:
        call: What to do.
        name: The module's.
    """

    def __init__(self, call: Callable[..., None], name: str) -> None:
        self._call, self._name = call, name

    def __reduce_ex__(self, _: Any) -> NoReturn:
        # A copy would tell this model's engine about another model's forward, without a word.
        raise UnsupportedError("an attached model cannot be copied or pickled: call engine.detach() first")


class _Entry(_Hook):
    """Before a module's forward."""

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 - torch's signature
        if not is_left_out():
            self._call(self._name)


class _Exit(_Hook):
    """After it, also when it raised; the output is None then."""

    def __init__(self, call: Callable[..., None], name: str, *, is_watched: bool) -> None:
        super().__init__(call, name)
        self.is_watched = is_watched

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 - torch's signature
        if not is_left_out():
            self._call(self._name, output)


def is_left_out() -> bool:
    """Return whether what runs now makes no nodes that anybody can look up later."""
    # A compiled module is one node, which nobody can look into; inside a backward pass a forward is run again.
    return torch.compiler.is_compiling() or bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001
