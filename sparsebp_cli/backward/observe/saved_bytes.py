"""Measures the tensors that autograd stores between forward and backward, and the memory of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from sparsebp_cli.backward.observe.module_trace import ModuleTrace


class SavedBytes:
    """Bytes stored for the backward; a storage saved by several operators counts once.

    Tensors that are released within the forward do not count: checkpointing saves the input of a layer before it knows
    that the layer needs no backward.
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
        address = _address(tensor)
        if module is not None and address not in self.by_storage:
            self._module[address] = module
        self.by_storage[address] = tensor.untyped_storage().nbytes()
        self._holders[address] += 1

    def drop(self, tensor: Tensor) -> None:
        """Remove a tensor from the count, unless others hold its storage or the forward is over.

        Args:
            tensor: The released tensor.
        """
        address = _address(tensor)
        if self._is_closed:
            return
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
    own = {_address(tensor) for tensor in parameters}
    saved = SavedBytes()

    def pack(tensor: Tensor) -> _Saved:
        if _address(tensor) in own:
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
    """Return the memory of tensors; a storage that several share counts once.

    Args:
        tensors: Parameters, gradients or optimizer state; None counts nothing.

    Returns:
        Bytes.
    """
    return sum({_address(t): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
