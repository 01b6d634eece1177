"""Bytes that autograd holds at any one time, counted as they come and go, forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class LiveBytes:
    """What is held now, and the most that ever was; storages that several operators save count once."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._holders: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Holder:
        """Count a tensor that is saved, until its holder is gone."""
        holder, storage = Holder(tensor.detach()), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._own:
            self._holders[address] += 1
            self.now += size if self._holders[address] == 1 else 0
            self.peak = max(self.peak, self.now)
            weakref.finalize(holder, self._release, address, size)
        return holder

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        self.now -= size if self._holders[address] == 0 else 0


class Holder:
    """Lives as long as autograd keeps the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def live_bytes(parameters: Iterable[Tensor]) -> Iterator[LiveBytes]:
    """Count inside of the block; parameters are there anyway."""
    live = LiveBytes(parameters)
    with saved_tensors_hooks(live.pack, lambda holder: holder.tensor):
        yield live
