"""Access to private names of PyTorch that only the audit needs, each through a function that says why.

The core has those that the engine needs, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _has_storage,
)
from torch._C._autograd import (  # type: ignore[attr-defined]  # the stub lacks one
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Pack = Callable[[Tensor], object]
Unpack = Callable[..., Tensor]
FOREACH_NORM = torch.ops.aten._foreach_norm  # noqa: SLF001 - the name of an operator


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; the address of its first byte is 0 for every empty one."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage, unlike tensors of opaque layouts such as MKL-DNN's."""
    return bool(_has_storage(tensor))


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a COO tensor; ``Tensor.values`` refuses one that is not coalesced."""
    return tensor._values()  # noqa: SLF001


def is_mutable(operator: OpOverload) -> bool:
    """Return whether an operator writes into its arguments, which only its schema shows."""
    return bool(operator._schema.is_mutable)  # noqa: SLF001


def has_fsdp_state(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module."""
    return hasattr(module, "_get_fsdp_state")


def fsdp_state(module: nn.Module) -> object:
    """Return the state that ``fully_shard`` stores for a module; its parameter groups have no public access."""
    get_state = module._get_fsdp_state  # noqa: SLF001
    assert callable(get_state)
    return get_state()


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


def without_torch_functions() -> AbstractContextManager[None]:
    """Return a context in which the ``__torch_function__`` of subclasses is not called."""
    return DisableTorchFunctionSubclass()


def accepts_saved_hooks() -> bool:
    """Return whether saved-tensor hooks may be installed now."""
    return bool(_saved_tensors_hooks_is_enabled())


def push_saved_hooks(pack: Pack, unpack: Unpack) -> None:
    """Install saved-tensor hooks until they are removed; the public context manager must end in the same frame."""
    _push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_hooks() -> None:
    """Remove the innermost saved-tensor hooks."""
    _pop_saved_tensors_default_hooks()


def top_saved_hooks() -> tuple[object, object] | None:
    """Return the innermost saved-tensor hooks; None without any."""
    top = _top_saved_tensors_default_hooks(False)
    return None if top is None else (top[0], top[1])
