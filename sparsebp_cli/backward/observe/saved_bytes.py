"""Measures what autograd keeps between forward and backward, and what tensors occupy."""

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
    """Bytes saved for the backward; storages that several operators save count once.

    What is saved and let go again within the forward does not count: checkpointing notes the input of a layer before it
    knows that the layer will need no backward.
    """

    def __init__(self) -> None:
        self.by_storage: dict[int, int] = {}
        self._module: dict[int, str] = {}
        self._holders: Counter[int] = Counter()
        self._is_closed = False

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_storage.values())

    @property
    def by_module(self) -> Counter[str]:
        """The same by the innermost module whose forward saved them first; empty when modules were not asked for."""
        count: Counter[str] = Counter()
        for address, module in self._module.items():
            count[module] += self.by_storage[address]
        return count

    def add(self, tensor: Tensor, module: str | None) -> None:
        """Count a tensor.

        Args:
            tensor: That is saved.
            module: Where; None when nobody asks.
        """
        address = _address(tensor)
        if module is not None and address not in self.by_storage:
            self._module[address] = module
        self.by_storage[address] = tensor.untyped_storage().nbytes()
        self._holders[address] += 1

    def drop(self, tensor: Tensor) -> None:
        """Count a tensor no more that was added, unless others hold it or the forward is over.

        Args:
            tensor: That is let go.
        """
        address = _address(tensor)
        if self._is_closed:
            return
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address], self.by_storage[address]
            self._module.pop(address, None)

    def close(self) -> None:
        """Stay as it is: what is let go from now on is let go by the backward."""
        self._is_closed = True


@contextmanager
def saved_bytes(parameters: Iterable[Tensor] = (), modules: ModuleTrace | None = None) -> Iterator[SavedBytes]:
    """Measure what the forward passes inside save for the backward.

    Args:
        parameters: Tensors that are there anyway: they, and views of them, are not counted.
        modules: Knows which module runs; None: bytes are not told by module.

    Yields:
        SavedBytes: Follows what is saved while the block runs; when it has ended, what was saved then.
    """
    own = {_address(tensor) for tensor in parameters}
    saved = SavedBytes()

    def pack(tensor: Tensor) -> _Saved:
        if _address(tensor) in own:
            return _Saved(tensor.detach(), None)
        saved.add(tensor, None if modules is None else modules.current)
        return _Saved(tensor.detach(), saved)  # the tensor itself would keep its own graph alive

    with saved_tensors_hooks(pack, lambda packed: packed.tensor):
        try:
            yield saved
        finally:
            saved.close()


class _Saved:
    """What autograd holds in place of a tensor: it tells when it is let go.

    Args:
        tensor: The tensor.
        saved: Counts it; None: nobody does.
    """

    def __init__(self, tensor: Tensor, saved: SavedBytes | None) -> None:
        self.tensor, self._saved = tensor, saved

    def __del__(self) -> None:
        if self._saved is not None:
            self._saved.drop(self.tensor)


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return what tensors occupy; storages that several share count once.

    Args:
        tensors: Parameters, gradients or optimizer state; None counts nothing.

    Returns:
        Bytes.
    """
    return sum({_address(t): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
