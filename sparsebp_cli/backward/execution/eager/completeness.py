"""Determines whether a gradient that arrives at a parameter is complete.

In one pass of PyTorch's engine a parameter's gradient arrives once, as the sum over all its uses. Reentrant activation
checkpointing runs passes within the pass. Then a parameter in two checkpointed segments gets two gradients, which the
graph does not show in advance. So after it has detected such checkpointing, this module counts uses in the forward. A
gradient that cannot be proved complete waits for the end of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsebp_cli.backward.observe.graph import LEAF, walk

_REENTRANT = "CheckpointFunction"  # PyTorch's class; DeepSpeed's and fairscale's classes contain the same name

_Use = tuple[int, bool]  # the parameter's id, and whether a graph is recorded


class GradientCompleteness:
    """Determines whether a gradient that arrives at one of ``parameters`` is complete.

    It counts uses in the forward of ``model`` after it has first detected reentrant checkpointing.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._model, self._parameters = model, {id(p) for p in parameters}
        self._graph = GraphSummary(frozenset(), is_reentrant=False, bytes_at_once=0)
        self._uses: UseCounter | None = None
        self._counted: Counter[_Use] | None = None

    def read_graph(self, loss: Tensor) -> None:
        """Read the graph of a pass before it runs."""
        self._graph = read_graph(loss)
        self._counted = None if self._uses is None else self._uses.take()

    def skip(self) -> None:
        """Reset the use counts after a forward whose pass is not checked."""
        if self._uses is not None:
            self._uses.take()

    @property
    def bytes_at_once(self) -> int:
        """Largest number of bytes of gradients that one node of the graph produces together."""
        return self._graph.bytes_at_once

    @property
    def leaves(self) -> frozenset[Tensor]:
        """Tensors that collect a gradient in the graph."""
        return self._graph.leaves

    def is_complete(self, parameter: Tensor) -> bool:
        """Return whether the gradient that has just arrived is complete in this pass; False also if unknown."""
        is_direct = parameter in self._graph.leaves
        if is_direct and not self._graph.is_reentrant:
            return True
        self._count_uses()
        if self._counted is None:
            return False
        recorded, unrecorded = self._counted[id(parameter), True], self._counted[id(parameter), False]
        # Uses under a recorded graph arrive as one sum. A use without a graph may be in a checkpointed segment, or in
        # the forward of a Python Function.
        return recorded + unrecorded == 1 or (is_direct and unrecorded == 0)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        if self._uses is not None:
            self._uses.remove()
        self._uses = None

    def _count_uses(self) -> None:
        """Count uses from the next forward on, so that models without reentrant checkpointing have no overhead."""
        if self._uses is None:
            self._uses = UseCounter(self._model, self._parameters)


@dataclass(frozen=True)
class GraphSummary:
    """Facts about a graph that has not run yet."""

    leaves: frozenset[Tensor]  # tensors that collect a gradient
    is_reentrant: bool  # whether a node runs its own backward pass
    bytes_at_once: int  # largest number of bytes of gradients that one node produces together


def read_graph(loss: Tensor) -> GraphSummary:
    """Return facts about the graph of a loss."""
    leaves, is_reentrant, most = set[Tensor](), False, 0
    for node in walk(loss.grad_fn):
        is_reentrant = is_reentrant or _REENTRANT in node.name()
        children = (cast("Any", child) for child, _ in node.next_functions if child is not None)
        own: set[Tensor] = {child.variable for child in children if child.name() == LEAF}
        leaves |= own
        if len(own) > 1:  # a single gradient is counted when it arrives, since it may be sparse
            most = max(most, sum(leaf.nbytes for leaf in own))
    return GraphSummary(frozenset(leaves), is_reentrant, most)


class UseCounter:
    """Counts how often a model's forward uses each parameter, with and without a recorded graph."""

    def __init__(self, model: nn.Module, parameters: set[int]) -> None:
        self._count, self._ran = Counter[_Use](), False
        self._parameters = parameters
        self._modes: list[TorchFunctionMode] = []
        self._hooks = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            # always_call, so that a failed forward does not leave its mode active.
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> Counter[_Use] | None:
        """Return the counts since the last call; None if the model has not run since."""
        count, self._count, ran, self._ran = self._count, Counter(), self._ran, False
        return count if ran else None

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: object) -> None:
        if torch.is_grad_enabled() and not self._modes:
            mode = _Counting(self._count, self._parameters)
            # Enter the mode explicitly, since it must last from one hook to the other.
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._ran = True
            self._modes.append(mode)

    def _leave(self, *_: object) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)


class _Counting(TorchFunctionMode):
    def __init__(self, count: Counter[_Use], parameters: set[int]) -> None:
        super().__init__()
        self._count, self._parameters = count, parameters

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        is_recorded = torch.is_grad_enabled()
        if not isinstance(result, bool | int | str | torch.dtype | torch.device):  # reading metadata does not count
            for value in (*args, *(kwargs or {}).values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if id(each) in self._parameters:
                        self._count[id(each), is_recorded] += 1
        return result
