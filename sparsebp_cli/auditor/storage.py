"""Who owns the memory of a tensor: its storage as a number, and the parameter that it was made from alone.

Numbers are addresses, which PyTorch gives to somebody else as soon as a storage dies. A weak reference to the storage
keeps its address from being given away, and does not keep its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def key_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage; of a tensor that wraps others (DTensor, Float8), of the first.

    Args:
        tensor: That has one: :func:`tensors_in` yields no others.

    Returns:
        The number.
    """
    return int(_plain(tensor).untyped_storage()._cdata)  # noqa: SLF001 - the only identity there is


def refer(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage; its ``cdata`` is :func:`key_of`."""
    return StorageWeakRef(_plain(tensor).untyped_storage())  # type: ignore[no-untyped-call]


def has_died(reference: StorageWeakRef) -> bool:
    """Return whether a storage is gone."""
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def num_bytes(tensor: Tensor) -> int:
    """Return what a tensor's storage occupies."""
    return int(_plain(tensor).untyped_storage().nbytes())


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage: not one of a layout of its own, such as MKL-DNN's."""
    return torch._C._has_storage(_plain(tensor))  # noqa: SLF001 - what the public copy functions ask


def _plain(tensor: Tensor) -> Tensor:
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    if tensor.layout is torch.sparse_coo:
        return tensor._values()  # noqa: SLF001 - values() asks for a coalesced one
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense one whose numbers can be looked at."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or result.

    Args:
        value: A tensor, a list, tuple or dict of them, or anything else.

    Yields:
        Tensor: In their order; none without a storage.
    """
    if isinstance(value, Tensor):
        if has_storage(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class Weights:
    """Storages of parameters, and of what was made of one parameter alone: casts, copies, scaled forms."""

    def __init__(self) -> None:
        self._name: dict[int, str] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._own: set[int] = set()

    def add(self, parameter: Tensor, name: str) -> None:
        """Take in a parameter.

        Args:
            parameter: Held by its model for as long as it is watched.
            name: Its name.
        """
        key = key_of(parameter)
        self._made[key] = refer(parameter)
        self._name.setdefault(key, name)
        self._own.add(key)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the parameter that a tensor is, views, or was made from alone; None for anything else."""
        return self._name.get(key_of(tensor))

    def is_parameter(self, key: int) -> bool:
        """Return whether a storage is a parameter's own."""
        return key in self._own

    def follow(self, inputs: list[Tensor], outputs: list[Tensor]) -> str | None:
        """Note what an operator makes of a single parameter: as many numbers as that had, and of nothing else.

        Args:
            inputs: Of the operator.
            outputs: Of the operator.

        Returns:
            The parameter among the inputs, if there is one.
        """
        found = next((name for tensor in inputs if (name := self.name_of(tensor)) is not None), None)
        large = [tensor for tensor in inputs if tensor.numel() > 1]
        for output in outputs:
            key = key_of(output)
            if key in self._own:
                continue
            if found is None or len(large) != 1 or output.numel() != large[0].numel():
                if key in self._name and all(key_of(tensor) != key for tensor in inputs):
                    del self._name[key], self._made[key]  # the address is somebody else's now
            elif self.name_of(large[0]) is not None:
                self._made[key], self._name[key] = refer(output), found
        return found

    def forget(self) -> None:
        """Drop what has died."""
        for key in [key for key, reference in self._made.items() if has_died(reference)]:
            del self._made[key], self._name[key]
            self._own.discard(key)
