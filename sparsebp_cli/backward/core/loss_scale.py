"""The loss scale of a pass.

A ``torch.amp.GradScaler`` multiplies the loss by a factor that changes during the training, and later divides the
gradients of parameters by it. Gradients at sites contain the factor, so the engine divides stored and observed
gradients by it.
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

# Operations that a script may apply to a scaled loss. The search for the factor passes through no others.
_PASSED = frozenset({"AddBackward0", "DivBackward0", "MulBackward0", "SumBackward0"})
_MOST = 16  # limit of operations searched in a loss, and of new factors whose owners are searched
_LEAST_BY_HAND = 16.0  # a factor that is a power of two and at least this is probably a loss scale


def remove_scale(gradient: Tensor, scale: Tensor | float | None) -> Tensor:
    """Return a gradient divided by the loss scale, in at least float32, because float16 could underflow. Without a
    scale keep the dtype. Entries that are not finite become 0.
    """
    if scale is not None:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / _at(scale, gradient)
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


def _at(scale: Tensor | float, other: Tensor) -> Tensor | float:
    return scale.to(other.device) if isinstance(scale, Tensor) else scale


def refuse_scale() -> NoReturn:
    """Raise :class:`UnsupportedError`: an eager update frees gradients before a scaler could divide them."""
    raise UnsupportedError(
        "update='eager' with a GradScaler is not supported: parameters would be updated before the gradients are "
        "unscaled; use bfloat16, or update='deferred'"
    )


class ScaleFinder:
    """Finds the factor by which a ``GradScaler`` has multiplied a loss.

    The engine has no access to the script's scaler. But the scaler owns its factor, a tensor, and the graph of a scaled
    loss refers to the same tensor. The finder checks whether the tensor's owner is a ``GradScaler``.
    """

    def __init__(self) -> None:
        self.note: str = ""  # warning that the script seems to scale a loss by hand; empty: no such loss
        self._scales: list[weakref.ref[Tensor]] = []
        self._num_searches = 0
        self._others: list[tuple[weakref.ref[Tensor], bool]] = []  # other factors, and whether they were searched

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
        """Set ``note`` if the script seems to scale by a number. The engine cannot divide by it, since it may be a loss
        weight instead. The number is on the CPU, so reading it does not wait for a device."""
        if factor is None or factor.dim() or factor.dtype not in {torch.float64, torch.int64} or factor.is_cuda:
            return
        try:
            number = float(factor)
        except RuntimeError:  # while operators are counted, torch saves a Python number that it declares as a tensor
            return
        if number >= _LEAST_BY_HAND and math.frexp(number)[0] == 0.5:
            self.note = (
                f"the script multiplied a loss by {number:g} before the backward: if the script also divides the "
                f"gradients before the step, call engine.backward(loss * {number:g}, loss_scale={number:g}), so that "
                "policies get the unscaled gradients"
            )

    def _is_scale(self, factor: Tensor) -> bool:
        if factor.dim() or factor.dtype != torch.float32 or factor.requires_grad:
            return False  # a Python number is float64 or int64 here
        if any(scale() is factor for scale in self._scales):
            return True
        self._others = [other for other in self._others if other[0]() is not None]
        was_searched = next((searched for other, searched in self._others if other() is factor), None)
        # A search takes about 40 ms in a process with transformers. If a script multiplies its loss by a new tensor at
        # each step, limit the searches: after _MOST, search only factors that come again, as a scaler's does.
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
    """Calls a function with the tensor that the script's ``backward`` differentiates, just before it does so."""

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
