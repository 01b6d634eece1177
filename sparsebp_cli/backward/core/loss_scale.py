"""The unit of gradients: the loss scale of a pass.

A ``torch.amp.GradScaler`` multiplies the loss by a factor that changes during the training, and divides the gradients
of parameters by it later. Gradients at sites have the factor in them, so what a policy keeps or observes is divided by
it.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode

from sparsebp_cli.errors import UnsupportedError

# What a script may do to a loss after it was scaled. The factor is looked for below no other operation.
_PASSED = frozenset({"AddBackward0", "DivBackward0", "MulBackward0", "SumBackward0"})
_MOST = 16  # operations of one loss, and factors that are searched for at once
_LEAST_BY_HAND = 16.0  # a power of two from here on is hardly the weight of a loss


def remove_scale(gradient: Tensor, scale: Tensor | float | None) -> Tensor:
    """Return what a policy keeps of a gradient: without the loss scale, in float32 at least if there is one, since
    float16 could not hold it; entries that are not finite become 0.
    """
    if scale is not None:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / _at(scale, gradient)
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


def apply_scale(kept: Tensor, scale: Tensor | float | None) -> Tensor:
    """Return what was kept in the unit of the gradients of a pass."""
    return kept if scale is None else kept * _at(scale, kept)


def _at(scale: Tensor | float, other: Tensor) -> Tensor | float:
    return scale.to(other.device) if isinstance(scale, Tensor) else scale


def refuse_scale() -> NoReturn:
    """Raise :class:`UnsupportedError`: gradients are gone before a scaler could divide them."""
    raise UnsupportedError(
        "update='eager' with a GradScaler is not built: gradients would be applied before they are scaled back; "
        "use bfloat16, or update='deferred'"
    )


class ScaleFinder:
    """Finds the factor by which a ``GradScaler`` has multiplied a loss.

    The scaler belongs to the script. Its factor is a tensor that lives as long as the scaler, and the graph of a scaled
    loss refers to it, so it is recognised by the object that holds it.
    """

    def __init__(self) -> None:
        self.note: str = ""  # that a loss seems to be scaled by hand; empty: none does
        self._scales: list[weakref.ref[Tensor]] = []
        self._num_searches = 0
        self._others: list[tuple[weakref.ref[Tensor], bool]] = []  # and whether their owners were searched

    def find(self, loss: Tensor) -> Tensor | None:
        """Return the factor, 0-d; None if no scaler has scaled the loss."""
        nodes, num_seen = [loss.grad_fn], 0
        while nodes and num_seen < _MOST:
            node, num_seen = nodes.pop(), num_seen + 1
            if node is None or node.name() not in _PASSED:
                continue
            if node.name() == "MulBackward0":
                factor: Tensor | None = node._saved_other  # type: ignore[attr-defined]  # noqa: SLF001 - of torch's nodes
                if factor is not None and self._is_scale(factor):
                    return factor
                self._note_number(factor)
            nodes += [parent for parent, _ in node.next_functions]
        return None

    def _note_number(self, factor: Tensor | None) -> None:
        """Note a number that a script scales by. It cannot be divided by: a loss may have such a weight, and what the
        script does to gradients before its step looks like clipping. A number is on the CPU: nothing waits for it."""
        if factor is None or factor.dim() or factor.dtype not in {torch.float64, torch.int64} or factor.is_cuda:
            return
        try:
            number = float(factor)
        except RuntimeError:  # under a counter of operators: torch hands it a Python number where it names a tensor
            return
        if number >= _LEAST_BY_HAND and math.frexp(number)[0] == 0.5:
            self.note = (
                f"a loss was multiplied by {number:g} before its backward: if the script divides gradients by that "
                f"before its step, give engine.backward(loss * {number:g}, loss_scale={number:g}), or what policies "
                "keep of gradients is in the wrong unit once the number changes"
            )

    def _is_scale(self, factor: Tensor) -> bool:
        if factor.dim() or factor.dtype != torch.float32 or factor.requires_grad:
            return False  # a Python number is float64 or int64 here
        if any(scale() is factor for scale in self._scales):
            return True
        self._others = [other for other in self._others if other[0]() is not None]
        was_searched = next((searched for other, searched in self._others if other() is factor), None)
        # A search takes some 40 ms in a process with transformers. A script that multiplies its loss by a new tensor at
        # each step pays for a few: later factors are searched for when they come back, as a scaler's does.
        if was_searched or (was_searched is None and self._num_searches >= _MOST):
            self._others += [] if was_searched else [(weakref.ref(factor), False)]
            return False
        self._num_searches += 1
        self._others = [other for other in self._others if other[0]() is not factor]
        is_scale = any(issubclass(type(owner), GradScaler) for owner in gc.get_referrers(factor))
        if is_scale:
            self._scales.append(weakref.ref(factor))
        else:
            self._others.append((weakref.ref(factor), True))
        return is_scale


class RootWatch(TorchFunctionMode):
    """Calls a function with the tensor that a script's own function differentiates, right before it does."""

    def __init__(self, on_root: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._on_root = on_root

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            self._on_root(args[0])
        elif func is torch.autograd.backward:
            roots = args[0] if args else (kwargs or {})["tensors"]
            self._on_root(roots if isinstance(roots, Tensor) else roots[0])
        return func(*args, **(kwargs or {}))
