"""Measures what autograd keeps between forward and backward, and what tensors occupy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Bytes saved for the backward; storages that several operators save count once."""

    def __init__(self) -> None:
        self.by_storage: dict[int, int] = {}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_storage.values())


@contextmanager
def saved_bytes(parameters: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Measure what the forward passes inside save for the backward.

    Args:
        parameters: Tensors that are there anyway: they, and views of them, are not counted.

    Yields:
        SavedBytes: Grows while the block runs. Right as long as the graph lives that was built inside.
    """
    own = {_address(tensor) for tensor in parameters}
    saved = SavedBytes()

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in own:
            saved.by_storage[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


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
