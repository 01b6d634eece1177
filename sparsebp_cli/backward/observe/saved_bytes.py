"""Measures the tensors that autograd stores between forward and backward, and the memory of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.module_trace import ModuleTrace


class SavedBytes:
    """Bytes stored for the backward; a storage saved by several operators counts once.

    Tensors that autograd releases within the forward do not count: checkpointing saves the input of a layer before it
    knows that the layer needs no backward.
    """

    def __init__(self) -> None:
        self.by_storage: dict[int, int] = {}
        self._module: dict[int, str] = {}
        self._holders: Counter[int] = Counter()
        self._is_closed = False

    @property
    def total(self) -> int:
        """Bytes of all storages."""
        return sum(self.by_storage.values())

    @property
    def by_module(self) -> Counter[str]:
        """Bytes by the innermost module whose forward saved them first; empty if modules were not traced."""
        count: Counter[str] = Counter()
        for address, module in self._module.items():
            count[module] += self.by_storage[address]
        return count

    def add(self, tensor: Tensor, module: str | None) -> None:
        """Count a saved tensor.

        Args:
            tensor: A tensor that autograd saved; its whole storage counts, once for all tensors that share it.
            module: The module that saved it; None: do not count by module.
        """
        for address, num_bytes in _storages(tensor):
            if module is not None and address not in self.by_storage:
                self._module[address] = module
            self.by_storage[address] = num_bytes
            self._holders[address] += 1

    def drop(self, tensor: Tensor) -> None:
        """Remove a tensor from the count, unless other tensors use its storage or the forward has ended.

        Args:
            tensor: The released tensor.
        """
        if self._is_closed:
            return
        for address, _ in _storages(tensor):
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address], self.by_storage[address]
                self._module.pop(address, None)

    def close(self) -> None:
        """Stop counting: from now on the backward releases tensors."""
        self._is_closed = True


@contextmanager
def saved_bytes(parameters: Iterable[Tensor] = (), modules: ModuleTrace | None = None) -> Iterator[SavedBytes]:
    """Measure what the forward passes in the block save for the backward.

    Args:
        parameters: Tensors that exist anyway: they and their views are not counted.
        modules: A trace for counts by module; None: no counts by module.

    Yields:
        SavedBytes: Updated while the block runs; afterwards, the bytes saved at its end.
    """
    own = {address for tensor in parameters for address, _ in _storages(tensor)}
    saved = SavedBytes()

    def pack(tensor: Tensor) -> _Saved:
        if own.issuperset(address for address, _ in _storages(tensor)):
            return _Saved(tensor.detach(), None)
        saved.add(tensor, None if modules is None else modules.current)
        return _Saved(tensor.detach(), saved)  # a reference to the tensor itself would keep its graph alive

    with saved_tensors_hooks(pack, lambda packed: packed.tensor):
        try:
            yield saved
        finally:
            saved.close()


class _Saved:
    """A saved tensor as autograd stores it; reports to ``saved`` when it is released."""

    def __init__(self, tensor: Tensor, saved: SavedBytes | None) -> None:
        self.tensor, self._saved = tensor, saved

    def __del__(self) -> None:
        if self._saved is not None:
            self._saved.drop(self.tensor)


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of parameters, gradients or states; a storage that several share counts once, None as 0."""
    return sum(dict(found for tensor in tensors if tensor is not None for found in _storages(tensor)).values())


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of a tensor's storage; for a wrapper, such as a quantised weight, of all its parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages(getattr(tensor, name))
    else:
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()
