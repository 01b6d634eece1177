"""Find tensors with their own storage inside wrapper tensors, containers and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BY_ROWS, _BY_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_DEPTH = 6  # levels of nested objects; optimizer states have two


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's data: itself, or the parts of a float8, sharded or sparse one."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()  # noqa: SLF001 - indices() refuses tensors that are not coalesced
        yield tensor._values()  # noqa: SLF001 - as above
    elif tensor.layout in _BY_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in _BY_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor


def tensors_in(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield every tensor in a value: a tensor, a container, or an object such as a low-rank optimizer's projector. A
    tensor that occurs twice is yielded twice."""
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        inner = vars(value).values()
    if depth > 0:
        for child in inner:
            yield from tensors_in(child, depth - 1)
