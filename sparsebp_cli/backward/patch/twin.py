"""A tensor that carries a second value through the functions of a script.

Each function of a :class:`Twin` runs a second time, without a graph, on the second value. So the result shows whether
it depends on entries in which the two values differ, without another call of the script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sparsebp_cli.backward.patch.rng import capture_generators, generators_at

# Allowed difference of two evaluations of one loss, in units of its last place: some kernels vary the order of sums.
LAST_PLACES = 2.0
# Functions that compute nothing of a tensor.
_SILENT = {"backward", "register_hook", "requires_grad_", "retain_grad", "__repr__", "__format__", "__deepcopy__"}
_SILENT |= {"__reduce_ex__", "__set__", "__delete__", "is_floating_point", "size", "dim", "stride", "data_ptr"}


class Twin(Tensor):
    """A tensor with a second value.

    Attributes:
        other: The second value, without a graph.
        refuse: Called if a differentiated result differs from its second value; it must raise an error.
    """

    other: Tensor
    refuse: Callable[[], None]

    @staticmethod
    def of(value: Tensor, other: Tensor, refuse: Callable[[], None]) -> Twin:
        """Return a tensor with the graph of ``value`` and the second value ``other``."""
        made = value if isinstance(value, Twin) else value.as_subclass(Twin)
        made.other, made.refuse = other.detach(), refuse
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and run it again on the second values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the public name of this is in a subclass alone
            if name == "backward":
                settle(args[0])
            if name in _SILENT or name.startswith("is_"):
                return func(*args, **kwargs)
            carrier = _find(args, kwargs)
            if carrier is None:
                return func(*args, **kwargs)
            target = args[0] if args and _changes(name) and isinstance(args[0], Tensor) else kwargs.get("out")
            second: tuple[Any, ...] = tree_map(_second, args)
            if isinstance(target, Tensor) and not isinstance(target, Twin) and target is not kwargs.get("out"):
                second = (target.detach().clone(), *second[1:])
            before = capture_generators(carrier.device) if "out" not in kwargs else None
            result = func(*args, **kwargs)
            if before is None:
                return result
            try:
                with torch.no_grad(), generators_at(before, carrier.device):
                    others = func(*second, **tree_map(_second, kwargs))
            except Exception:  # the function does not support a second value; from here on only the gradient is checked
                return result
            if isinstance(target, Tensor) and not isinstance(target, Twin):
                target.__class__ = Twin
                target.other, target.refuse = second[0], carrier.refuse  # type: ignore[attr-defined]
            return _pair(result, others, carrier.refuse)


def settle(value: Tensor) -> Tensor:
    """Return a tensor without its second value; call its ``refuse`` if the two values differ."""
    if not isinstance(value, Twin):
        return value
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        plain = value.as_subclass(Tensor)
        first, second = plain.detach().double(), value.other.double()
        apart = (first - second).abs() > LAST_PLACES * torch.finfo(plain.dtype).eps * first.abs()
        if bool((apart | (first.isnan() != second.isnan())).any()):
            value.refuse()
        return plain


def _find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Twin | None:
    found: list[Twin] = []

    def look(value: Any) -> Any:
        if isinstance(value, Twin) and hasattr(value, "other"):
            found.append(value)
        return value

    tree_map(look, (args, kwargs))
    return found[0] if found else None


def _changes(name: str) -> bool:
    """Return whether a function with this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _second(value: Any) -> Any:
    return value.other if isinstance(value, Twin) and hasattr(value, "other") else value


def _pair(result: Any, other: Any, refuse: Callable[[], None]) -> Any:
    if isinstance(result, Tensor) and isinstance(other, Tensor):
        return Twin.of(result, other, refuse)
    if isinstance(result, tuple | list) and isinstance(other, tuple | list) and len(result) == len(other):
        parts = [_pair(one, two, refuse) for one, two in zip(result, other, strict=True)]
        return type(result)(parts) if type(result) in (tuple, list) else result
    return result
