"""Run code on tensors without data, with PyTorch's FakeTensorMode.

Whole numbers and booleans that follow from others stay real, so the host reads the same ids, labels and masks as in
training. Values that follow from weights are unknown; if the host reads one, it gets a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sparsebp_tools.forecast.fake.attention import attend

if TYPE_CHECKING:
    from torch._ops import OpOverload

MOST_REAL = 2**26  # entries of a real tensor, such as a mask; a larger one becomes fake, too
FOREACH = "torch.utils._foreach_utils._get_foreach_kernels_supported_devices"


@dataclass
class StandIns:
    """Counts the unknown values that the host has read."""

    number: int = 0


@contextmanager
def pretend(*, gpu: bool) -> Iterator[StandIns]:
    """Run a block on tensors without data.

    Args:
        gpu: Whether to behave like PyTorch on a GPU: attention by a fused kernel, also with dropout, and optimizers
            that update all parameters at once. Tensors report a CPU in either case.

    Yields:
        StandIns: Counts the placeholders for unknown values. New tensors in the block hold no data, except small ones
        of whole numbers.
    """
    found = StandIns()
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
            stack.enter_context(patch(FOREACH, lambda: ["cpu", "cuda"]))
        # PyTorch swaps a fake tensor for the moved one, and refuses while other references to it exist.
        stack.enter_context(patch.object(nn.Module, "_apply", _replace))
        # PyTorch's own deepcopy copies bytes from and to the null pointer, such as for a head that peft trains whole,
        # and crashes Python.
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _copy, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Values(found))
        yield found


def _replace(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Do the same as ``Module._apply``, but replace parameters that change by new ones."""
    for child in module.children() if recurse else ():
        _replace(child, function)
    for key, parameter in module._parameters.items():  # noqa: SLF001 - a parameter is replaced here
        if parameter is not None:
            with torch.no_grad():
                made = function(parameter)
            if made is not parameter:
                module._parameters[key] = nn.Parameter(made, parameter.requires_grad)  # noqa: SLF001
    for key, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None:
            module._buffers[key] = function(buffer)  # noqa: SLF001
    return module


def _copy(tensor: FakeTensor, memo: dict[int, object]) -> Tensor:
    """Return a deep copy of a tensor without data."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    found = memo[id(tensor)]
    assert isinstance(found, Tensor)
    return found


class _Values(TorchDispatchMode):
    """Compute on real tensors if possible, and insert placeholders for unknown values."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_ins = stand_ins

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in given):
            return _compute(func, args, kwargs, has_inputs=bool(given))
        name = func.overloadpacket.__name__
        found = stand_in(name, args)
        if name.startswith(("index", "_index_put", "_unsafe_index")) and len(args) > 1:
            args = (args[0], _number(args[1]), *args[2:])
        if found is None:
            return func(*args, **kwargs)
        self._stand_ins.number += 1
        return found


def _compute(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], *, has_inputs: bool) -> Any:
    """Run an operator without fake inputs, for real if its results are small and, without inputs, whole numbers."""
    if not has_inputs or not _writes(func):
        found = func(*args, **kwargs)
        made = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
        # A number in an expression, such as the 1.0 of torch.where(mask, 1.0, x), is a known input.
        has_inputs = has_inputs or func.overloadpacket.__name__ == "scalar_tensor"
        is_whole = all(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in made)
        is_drawn = kwargs.get("generator") is not None  # a policy's random draw: weights are drawn without a generator
        if sum(tensor.numel() for tensor in made) > MOST_REAL or not (has_inputs or is_whole or is_drawn):
            return found
    with _disable_current_modes():
        return func(*args, **kwargs)


def _writes(func: OpOverload) -> bool:
    """Return whether an operator changes an input or needs its values, so that fake inputs cannot be tried first."""
    return func._schema.is_mutable or func.overloadpacket.__name__ in _NEEDS_VALUES  # noqa: SLF001 - not public


_UNKNOWN_SIZE = frozenset({"nonzero", "bincount"})
# Below autograd, as in a custom backward, the last two arrive under the name of the call.
_SCALAR = frozenset({"_local_scalar_dense", "item", "is_nonzero"})
_NEEDS_VALUES = _UNKNOWN_SIZE | _SCALAR | {
    "masked_select", "unique_dim", "unique_consecutive", "_unique2", "equal", "allclose",
    "repeat_interleave", "index",
}  # fmt: skip


def _number(indices: Any) -> Any:
    """Return indices with masks replaced by positions; an unknown mask becomes all positions."""
    if not isinstance(indices, list | tuple):
        return indices
    found: list[object] = []
    for index in indices:
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        elif isinstance(index, FakeTensor):
            found += [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]
        else:
            with _disable_current_modes():
                found += list(index.nonzero(as_tuple=True))
    return found


def stand_in(name: str, args: tuple[Any, ...]) -> Any:
    """Return the placeholder for an operator that reads values of a tensor without data: the number 1, or for an
    unknown size the largest one. None for other operators."""
    if name in _SCALAR:
        is_bool, is_real = args[0].dtype == torch.bool or name == "is_nonzero", args[0].is_floating_point()
        return True if is_bool else 1.0 if is_real else 1
    if name in _UNKNOWN_SIZE:
        size = (args[0].numel(), args[0].dim()) if name == "nonzero" else (args[0].numel(),)
        return args[0].new_empty(size, dtype=torch.long)
    if name in ("equal", "allclose"):
        return True
    return None
