"""Record tensors that autograd saved for the backward: their module and size, and whether any used gradient depended on
them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from sparsebp_audit.auditor.internals import (
    Pack,
    Unpack,
    accepts_saved_hooks,
    pop_saved_hooks,
    push_saved_hooks,
    top_saved_hooks,
)
from sparsebp_audit.auditor.storage import has_storage, key_of, num_bytes
from sparsebp_cli.backward.observe.internals import next_sequence_number

if TYPE_CHECKING:
    from sparsebp_audit.auditor.module import AnyModules
    from sparsebp_audit.auditor.storage import Weights

Disable = Callable[[str], AbstractContextManager[None]]


@dataclass
class Kept:
    """One saved storage, possibly saved by several operators."""

    module: str  # the module whose forward saved it first
    num_bytes: int  # bytes of the whole storage
    shape: tuple[int, ...]  # shape of the first saved tensor
    numbers: list[int] = field(default_factory=list)  # numbers of the nodes that saved it
    alive: int = 0  # its saved tensors that graphs still hold
    is_unpacked: bool = False  # the backward has read it
    num_reads: int = 0  # reads by operators inside a backward
    need: int = 0  # leaves to which its readers lead
    padding_share: float = 0.0  # fraction of its rows at padding positions; 0 if it has no such rows
    zero_share: float | None = None  # fraction of its rows read only by products with zero gradient rows


class Packed:
    """A saved tensor in the form that the graph holds; it reports when the graph releases it."""

    __slots__ = ("_kept", "_saved", "key", "tensor")
    key: int
    tensor: Tensor

    def __init__(self, saved: SavedTensors, kept: Kept | None, key: int, tensor: Tensor) -> None:
        self._saved, self._kept, self.key, self.tensor = saved, kept, key, tensor
        if kept is not None:
            kept.alive += 1

    def unpack(self) -> Tensor:
        """Return the tensor to the backward."""
        if self._kept is not None:
            self._kept.is_unpacked = True
        return self.tensor

    def __del__(self) -> None:
        kept = self._kept
        if kept is not None:
            kept.alive -= 1
            if kept.alive == 0:
                self._saved.release(self.key, kept)


class SavedTensors:
    """Saved-tensor hooks of this thread; parameters are not counted."""

    is_active: bool
    has_seen: bool

    def __init__(self, modules: AnyModules, weights: Weights) -> None:
        self._modules, self._weights = modules, weights
        self.by_key: dict[int, Kept] = {}
        self.released: list[Kept] = []
        self.is_active = self.has_seen = False
        self.rows: tuple[int, int, float] | None = None  # B, T, fraction of padding
        self._hooks: tuple[Pack, Unpack] | None = None

    def start(self) -> None:
        """Install the hooks, unless any are installed."""
        if self._hooks is not None:
            self.is_active = True
        elif top_saved_hooks() is None and accepts_saved_hooks():
            self._hooks = (self._pack, _unpack)
            push_saved_hooks(*self._hooks)
            self.is_active = self.has_seen = True

    def stop(self) -> None:
        """Remove the hooks; below another library's hooks, they stay without effect."""
        self.is_active = False
        if self._hooks is not None and top_saved_hooks() == self._hooks:
            pop_saved_hooks()
            self._hooks = None

    def release(self, key: int, kept: Kept) -> None:
        """Record that no graph holds a storage any more."""
        if self.by_key.get(key) is kept:
            del self.by_key[key]
        self.released.append(kept)

    def take_all(self) -> list[Kept]:
        """Return all storages, both released ones and ones that graphs still hold."""
        return self.released + list(self.by_key.values())

    def _pack(self, tensor: Tensor) -> Packed:
        plain = tensor.detach()  # a reference to the tensor itself would keep its graph alive
        if not has_storage(tensor):
            return Packed(self, None, 0, plain)
        key = key_of(tensor)
        if not self.is_active or self._weights.is_parameter(key):
            return Packed(self, None, key, plain)
        kept = self.by_key.get(key)
        if kept is None:
            kept = self.by_key[key] = Kept(self._modules.current, num_bytes(tensor), tuple(tensor.shape))
            kept.padding_share = self._padding_share(kept.shape)
        # A node gets its number when it is created, just before it saves its tensors.
        kept.numbers.append(next_sequence_number() - 1)
        return Packed(self, kept, key, plain)

    def _padding_share(self, shape: tuple[int, ...]) -> float:
        if self.rows is None or not shape:
            return 0.0
        size, length, share = self.rows
        flat = shape[0] == size * length
        apart = len(shape) >= 2 and shape[:2] == (size, length)
        heads = len(shape) == 4 and (shape[0], shape[2]) == (size, length)
        return share if flat or apart or heads else 0.0


def suspend_hooks(saved: SavedTensors) -> Callable[[Disable], Disable]:
    """Return a replacement of ``disable_saved_tensors_hooks`` that removes the audit's hooks first. ``torch.func``
    refuses to work while hooks are installed, and an audit must not make a training fail."""

    def make(disable: Disable) -> Disable:
        @functools.wraps(disable)
        @contextmanager
        def suspended(error_message: str) -> Iterator[None]:
            was_active = saved.is_active
            saved.stop()
            try:
                with disable(error_message):
                    yield
            finally:
                if was_active:
                    saved.start()

        return suspended

    return make


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()
