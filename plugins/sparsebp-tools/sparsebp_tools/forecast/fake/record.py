"""Record a step on tensors without data: every storage that an operator creates, and its release.

Temporaries inside an operator and the allocator's rounding are not recorded. Under a dispatch mode autograd adds
gradients of a tensor with several uses out of place. So one more activation than in a real step may exist for a moment.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsebp_tools.memory.curve import PARTS, MemoryCurve, MemoryPoint, Part, Phase
from sparsebp_tools.memory.profiler_record import Allocation, Event, MemoryLedger, PhaseStart, ProfilerNote
from sparsebp_tools.memory.storage import plain_tensors

if TYPE_CHECKING:
    from torch._ops import OpOverload


@dataclass
class _Wide:
    """A storage that was created as wide as the vocabulary."""

    num_bytes: int
    born: int
    part: Part = "workspace"


class FakeRecord(TorchDispatchMode):
    """Record the life of storages; time is the number of the event. It is a context manager, to be entered inside
    :func:`~sparsebp_tools.forecast.fake.mode.pretend`. ``vocabulary`` is the width of logits."""

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary = vocabulary
        self._events: list[Event] = []
        self._live: dict[int, weakref.ref[object]] = {}
        self._logits: set[int] = set()  # numbers of the allocations of logits

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Run one operator, and record the storages that it created."""
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, Tensor):
                is_wide = value.dim() > 1 and value.shape[-1] == self._vocabulary and value.is_floating_point()
                for plain in plain_tensors(value):
                    self._see(plain.untyped_storage(), is_wide=is_wide)
        return found

    def note(self, tensor: Tensor, part: Part) -> None:
        """Record the purpose of a tensor's storage."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            address = self.find_address(storage)
            self._watch(storage, address, storage.nbytes())  # a storage from before the record is not a new one
            self.note_block(address, storage.nbytes(), part)

    def note_block(self, address: int, num_bytes: int, part: Part | Literal["gone"]) -> None:
        """Record the purpose of a block, or its release."""
        if num_bytes:
            self._events.append(ProfilerNote(len(self._events), address, num_bytes, part))

    def find_address(self, storage: torch.UntypedStorage) -> int:
        """Return the key of a storage: storages without data have no address."""
        return int(storage._cdata)  # noqa: SLF001 - the only identity of a storage that holds nothing

    def begin(self, phase: Phase) -> None:
        """Record the beginning of a phase."""
        self._events.append(PhaseStart(len(self._events), phase))

    def take_curve(self) -> MemoryCurve:
        """Return the allocated bytes over the record."""
        ledger = MemoryLedger(0)
        ledger.read(self._events)
        return ledger.curve()

    def count_logits(self, point: MemoryPoint) -> Counter[Part]:
        """Return the bytes of logits, their gradients and the loss's copies at a point of the curve, split into values
        saved for the backward and workspace."""
        at, found, live = round(point.seconds * 1e9), Counter[Part](), dict[int, _Wide]()

        def end(address: int, time: int) -> None:
            block = live.pop(address, None)
            if block is not None and block.born <= at < time and block.part in ("activations", "workspace"):
                found[block.part] += block.num_bytes

        for number, event in enumerate(self._events):
            if isinstance(event, Allocation):
                end(event.address, number)
                if number in self._logits:
                    live[event.address] = _Wide(event.num_bytes, number)
            elif (
                isinstance(event, ProfilerNote)
                and event.part != "gone"
                and (block := live.get(event.address)) is not None
            ):
                block.part = min(block.part, event.part, key=PARTS.index)  # the gradient of a head counts as a gradient
        for address in list(live):
            end(address, len(self._events))
        return found

    def _see(self, storage: torch.UntypedStorage, *, is_wide: bool) -> None:
        address, num_bytes = self.find_address(storage), storage.nbytes()
        if not self._watch(storage, address, num_bytes):
            return
        if is_wide:
            self._logits.add(len(self._events))
        self._events.append(Allocation(len(self._events), address, num_bytes))

    def _watch(self, storage: torch.UntypedStorage, address: int, num_bytes: int) -> bool:
        """Watch for the release of a storage, and return whether it is new."""
        known = self._live.get(address)
        if not num_bytes or (known is not None and known() is storage):
            return False
        self._live[address] = weakref.ref(storage, lambda reference: self._gone(address, num_bytes, reference))
        return True

    def _gone(self, address: int, num_bytes: int, reference: weakref.ref[object]) -> None:
        if self._live.get(address) is reference:
            del self._live[address]
            self._events.append(Allocation(len(self._events), address, -num_bytes))
