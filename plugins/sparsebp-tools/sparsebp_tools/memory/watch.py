"""Note the purpose of storages in the allocator's record while a step runs, without changing the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from sparsebp_cli.errors import UnsupportedError
from sparsebp_tools.memory.curve import Part
from sparsebp_tools.memory.storage import plain_tensors, tensors_in


class Record(Protocol):
    """A record of the purposes of storages."""

    def note(self, tensor: Tensor, part: Part) -> None:
        """Record the purpose of a tensor's storage."""

    def note_block(self, address: int, num_bytes: int, part: Part | Literal["gone"]) -> None:
        """Record the purpose of a block, or its release."""

    def find_address(self, storage: torch.UntypedStorage) -> int:
        """Return the address of a storage; 0 if it is empty."""


class MemoryWatch:
    """Notes weights, gradients, optimizer state and saved activations. Enter this context manager inside the record's.

    ``also`` holds tensors from before the step that count as workspace. Raise :class:`UnsupportedError` if
    ``optimizer`` is not a torch optimizer.
    """

    def __init__(self, record: Record, model: nn.Module, optimizer: object, also: object = None) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        if inner is not None and not isinstance(inner, torch.optim.Optimizer):
            raise UnsupportedError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self._record, self._model, self._also = record, model, also
        self._optimizer: torch.optim.Optimizer | None = inner
        self._stack = ExitStack()
        self._watched: dict[int, weakref.ref[object]] = {}

    def __enter__(self) -> MemoryWatch:
        """Note existing tensors, and start."""
        self._note_all()
        self._note(self._also, "workspace")
        self._also = None
        for parameter in self._parameters():
            if parameter.requires_grad:
                self._stack.callback(_hook_first(parameter, self._note_gradient))
        if self._optimizer is not None:
            before = self._optimizer.register_step_pre_hook(lambda *_: self._note_gradients())
            self._stack.callback(before.remove)
        self._stack.enter_context(_packs_noted(lambda value: self._note(value, "activations")))
        self._stack.enter_context(saved_tensors_hooks(_detached, lambda tensor: tensor))
        return self

    def __exit__(self, *error: object) -> None:
        """Note new tensors, and stop."""
        self._stack.close()
        self._note_all()
        self._watched.clear()

    def _note_all(self) -> None:
        for tensor in (*self._parameters(), *self._model.buffers()):
            self._note([tensor, dict(vars(tensor))], "weights")  # a quantised weight holds its scales
        self._note_gradients()
        if self._optimizer is not None:
            self._note(self._optimizer.state, "optimizer")

    def _parameters(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        found = [*self._model.parameters(), *(parameter for group in groups for parameter in group["params"])]
        return list({id(parameter): parameter for parameter in found}.values())

    def _note_gradients(self) -> None:
        for parameter in self._parameters():
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._note(parameter.grad, "gradients")

    def _note(self, value: object, part: Part) -> None:
        for tensor in tensors_in(value):
            self._record.note(tensor, part)
            for plain in plain_tensors(tensor):
                self._watch(plain.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Note the release of a storage: the CPU allocator records no releases of blocks from before the record."""
        address, num_bytes = self._record.find_address(storage), storage.nbytes()
        known = self._watched.get(address)
        if not address or (known is not None and known() is storage):
            return
        gone = partial(self._gone, address, num_bytes)
        self._watched[address] = weakref.ref(storage, gone)

    def _gone(self, address: int, num_bytes: int, reference: weakref.ref[object]) -> None:
        if self._watched.get(address) is reference:
            del self._watched[address]
            self._record.note_block(address, num_bytes, "gone")


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()  # a reference to the tensor itself would keep its graph alive


@contextmanager
def _packs_noted(note: Callable[[object], None]) -> Iterator[None]:
    """Note the tensors that hooks actually store. Of nested saved-tensor hooks, PyTorch calls only the innermost. So
    activation checkpointing's hooks would otherwise hide what they store, and what its recomputed forward stores."""
    # See decision 19.
    original = saved_tensors_hooks.__enter__

    def enter(self: saved_tensors_hooks) -> None:
        def pack(tensor: Tensor) -> object:
            try:
                packed = self.pack_hook(tensor)
            except BaseException:  # checkpointing ends its second forward with an exception, after storing this tensor
                note(tensor)
                raise
            if isinstance(packed, Tensor | tuple | list):
                note(packed)
            return packed

        torch._C._autograd._push_saved_tensors_default_hooks(pack, self.unpack_hook)  # noqa: SLF001 - as PyTorch does

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]


def _hook_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> Callable[[], None]:
    """Register a hook before all others, because an eager update's hook frees the gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, object] = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - hooks cannot be ordered otherwise
    others = {key: value for key, value in hooks.items() if key != handle.id}
    mine = hooks[handle.id]
    hooks.clear()
    hooks[handle.id] = mine
    hooks.update(others)
    return handle.remove
