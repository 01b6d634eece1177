"""Which gradients are complete when they arrive.

In one pass of PyTorch's engine a parameter's gradient arrives once, as the sum over all its uses. Reentrant activation
checkpointing runs passes within the pass: what is used in two checkpointed segments arrives twice, and nothing in the
graph tells beforehand. So uses are counted in the forward, where such checkpointing was seen before. What cannot be
known to be complete waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_LEAF = "torch::autograd::AccumulateGrad"
_REENTRANT = "CheckpointFunction"  # PyTorch's; DeepSpeed's and fairscale's are called alike

_Use = tuple[int, bool]  # the parameter's identity, and whether a graph is recorded


class GradientCompleteness:
    """Judges whether a gradient that arrives is complete.

    Args:
        model: Whose forward passes are watched from when reentrant checkpointing was first seen.
        parameters: Those that are judged.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._model, self._parameters = model, {id(p) for p in parameters}
        self._graph = Survey(frozenset(), is_reentrant=False, bytes_at_once=0)
        self._uses: UseCounter | None = None
        self._counted: Counter[_Use] | None = None

    def survey(self, loss: Tensor) -> None:
        """Look at the graph of a pass before it runs.

        Args:
            loss: What is differentiated.
        """
        self._graph = survey(loss)
        self._counted = None if self._uses is None else self._uses.take()

    def pass_over(self) -> None:
        """Forget what the forward of a pass used that is not judged."""
        if self._uses is not None:
            self._uses.take()

    @property
    def bytes_at_once(self) -> int:
        """Bytes of gradients that one node of the graph gives at once, at most."""
        return self._graph.bytes_at_once

    @property
    def leaves(self) -> frozenset[Tensor]:
        """What collects a gradient in the graph."""
        return self._graph.leaves

    def is_complete(self, parameter: Tensor) -> bool:
        """Return whether no more of a gradient can arrive in this pass.

        Args:
            parameter: Whose gradient has just arrived.

        Returns:
            False also where it cannot be known.
        """
        is_direct = parameter in self._graph.leaves
        if is_direct and not self._graph.is_reentrant:
            return True
        self._count_uses()
        if self._counted is None:
            return False
        recorded, unrecorded = self._counted[id(parameter), True], self._counted[id(parameter), False]
        # What is used where a graph is recorded arrives together. Elsewhere it may be a checkpointed segment, or the
        # forward of a Function of Python.
        return recorded + unrecorded == 1 or (is_direct and unrecorded == 0)

    def remove(self) -> None:
        """Watch the model no more."""
        if self._uses is not None:
            self._uses.remove()
        self._uses = None

    def _count_uses(self) -> None:
        """From the next forward on: it costs a little, and nothing where there is no such checkpointing."""
        if self._uses is None:
            self._uses = UseCounter(self._model, self._parameters)


@dataclass(frozen=True)
class Survey:
    """What a graph tells before it is passed.

    Args:
        leaves: That collect a gradient in it.
        is_reentrant: Whether a node runs a pass of its own.
        bytes_at_once: The most that one node gives to leaves: their gradients are there together.
    """

    leaves: frozenset[Tensor]
    is_reentrant: bool
    bytes_at_once: int


def survey(loss: Tensor) -> Survey:
    """Look at the graph of a loss.

    Args:
        loss: What is differentiated.

    Returns:
        What it tells.
    """
    leaves, is_reentrant, most = set[Tensor](), False, 0
    seen: set[Node] = set() if loss.grad_fn is None else {loss.grad_fn}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        is_reentrant = is_reentrant or _REENTRANT in node.name()
        own: set[Tensor] = set()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child.name() == _LEAF:
                own.add(cast("Any", child).variable)
            elif child not in seen:
                seen.add(child)
                waiting.append(child)
        leaves |= own
        if len(own) > 1:  # one alone is counted when it arrives: it may be sparse
            most = max(most, sum(leaf.nbytes for leaf in own))
    return Survey(frozenset(leaves), is_reentrant, most)


class UseCounter:
    """Counts how often a model's forward uses each parameter, and whether a graph is recorded there.

    Args:
        model: While it runs, uses count.
        parameters: By identity.
    """

    def __init__(self, model: nn.Module, parameters: set[int]) -> None:
        self._count, self._ran = Counter[_Use](), False
        self._parameters = parameters
        self._modes: list[TorchFunctionMode] = []
        self._hooks = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self) -> Counter[_Use] | None:
        """Return the counts since this was last called; None if the model did not run since."""
        count, self._count, ran, self._ran = self._count, Counter(), self._ran, False
        return count if ran else None

    def remove(self) -> None:
        """Stop."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._modes:
            mode = _Counting(self._count, self._parameters)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._ran = True
            self._modes.append(mode)

    def _leave(self, *_: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Counting(TorchFunctionMode):
    def __init__(self, count: Counter[_Use], parameters: set[int]) -> None:
        super().__init__()
        self._count, self._parameters = count, parameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_recorded = torch.is_grad_enabled()
        if not isinstance(result, bool | int | str | torch.dtype | torch.device):  # asking for its shape is no use
            for value in (*args, *(kwargs or {}).values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if id(each) in self._parameters:
                        self._count[id(each), is_recorded] += 1
        return result
