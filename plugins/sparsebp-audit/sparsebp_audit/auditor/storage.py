"""Identify the storage of a tensor, and the single parameter from which a tensor was computed.

Keys are addresses, which PyTorch reuses after a storage is freed. A weak reference to the storage prevents this without
keeping its data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparsebp_audit.auditor import internals
from sparsebp_audit.auditor.internals import sparse_values, storage_key

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def key_of(tensor: Tensor) -> int:
    """Return the key of a tensor's storage; for a wrapper (DTensor, Float8), of its first inner tensor. The tensor must
    have a storage, like those of :func:`tensors_in`."""
    return storage_key(_plain(tensor))


def refer(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage; its ``cdata`` is :func:`key_of`."""
    return StorageWeakRef(_plain(tensor).untyped_storage())


def has_died(reference: StorageWeakRef) -> bool:
    """Return whether a storage was freed."""
    return bool(reference.expired())


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's storage."""
    return int(_plain(tensor).untyped_storage().nbytes())


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage, unlike tensors of opaque layouts such as MKL-DNN's."""
    return internals.has_storage(_plain(tensor))


def _plain(tensor: Tensor) -> Tensor:
    while is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    if tensor.layout is torch.sparse_coo:
        return sparse_values(tensor)
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary dense one whose numbers can be read."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors with a storage in an operator's arguments or result."""
    if isinstance(value, Tensor):
        if has_storage(value):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class Weights:
    """Storages of parameters, and of tensors computed from a single parameter: casts, copies, scaled versions."""

    def __init__(self) -> None:
        self._name: dict[int, str] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._own: set[int] = set()

    def add(self, parameter: Tensor, name: str) -> None:
        """Add a parameter; its model must keep it alive."""
        key = key_of(parameter)
        self._made[key] = refer(parameter)
        self._name.setdefault(key, name)
        self._own.add(key)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the parameter that a tensor is, views, or was computed from; None for other tensors."""
        return self._name.get(key_of(tensor))

    def is_parameter(self, key: int) -> bool:
        """Return whether a storage is a parameter's own."""
        return key in self._own

    def follow(self, inputs: list[Tensor], outputs: list[Tensor]) -> str | None:
        """Record what an operator computes from a single parameter, of the same size and nothing else. Return the
        parameter among the inputs, if any."""
        found = next((name for tensor in inputs if (name := self.name_of(tensor)) is not None), None)
        large = [tensor for tensor in inputs if tensor.numel() > 1]
        for output in outputs:
            key = key_of(output)
            if key in self._own:
                continue
            if found is None or len(large) != 1 or output.numel() != large[0].numel():
                if key in self._name and all(key_of(tensor) != key for tensor in inputs):
                    del self._name[key], self._made[key]  # the address was reused
            elif self.name_of(large[0]) is not None:
                self._made[key], self._name[key] = refer(output), found
        return found

    def forget(self) -> None:
        """Drop freed storages."""
        for key in [key for key, reference in self._made.items() if has_died(reference)]:
            del self._made[key], self._name[key]
            self._own.discard(key)
