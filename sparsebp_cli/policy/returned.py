"""Check what a decision of a policy returns, so that a mistake ends in one line that names the policy and its method.

Reading an index waits for the device, so selections of gradients are checked at the first decision of each site; the
conformance suite tries others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy.selection import (
    Blocks,
    Columns,
    Elements,
    Groups,
    Rows,
    Selection,
    Split,
    TwoToFour,
    Values,
)
from sparsebp_cli.policy.token import TokenChoice

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def require_type(asked: str, value: object, *allowed: type | None) -> None:
    """Refuse a value of another type.

    Args:
        asked: The policy's class and method, such as ``Mine.select``, and the place, if there are several.
        value: What it returned.
        *allowed: Types; None allows the value None.

    Raises:
        PolicyError: If the value has none of these types.
    """
    if not any(value is None if kind is None else isinstance(value, kind) for kind in allowed):
        names = " or ".join(dict.fromkeys("None" if kind is None else kind.__name__ for kind in allowed))
        raise PolicyError(f"{asked} must return {names}, got {_describe(value)}")


def require_names(asked: str, value: object, given: Collection[str]) -> frozenset[str]:
    """Return a collection of names as a set.

    Args:
        asked: As for :func:`require_type`.
        value: What it returned.
        given: The names that the method received.

    Returns:
        The names.

    Raises:
        PolicyError: If the value is no collection of strings, or has a string that is not among ``given``.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PolicyError(f"{asked} must return a collection of names, got {_describe(value)}")
    names = list(value)
    for name in names:
        if not isinstance(name, str) or name not in given:
            got = repr(name) if isinstance(name, str) else _describe(name)
            raise PolicyError(f"{asked} must return only names that it received, got {got}")
    return frozenset(names)


def require_index(
    asked: str, index_K: object, size: int, device: torch.device | None = None, *, reads: bool | None = None
) -> Tensor:
    """Return a tensor that is a valid index.

    Args:
        asked: As for :func:`require_type`, with the name of the field that holds the index.
        index_K: What it returned.
        size: The number of things among which the index chooses.
        device: The device on which the index must be; None: any.
        reads: Whether to check the values as well, which waits for the device; None: if they are on the CPU.

    Returns:
        The index.

    Raises:
        PolicyError: If it is not int64 of one dimension on the device, or if its values are not in ``[0, size)``, each
            at most once.
    """
    import torch

    if not isinstance(index_K, torch.Tensor) or index_K.dtype != torch.int64 or index_K.ndim != 1:
        raise PolicyError(f"{asked} must be an int64 tensor of one dimension, got {_describe(index_K)}")
    if device is not None and index_K.device != device:
        raise PolicyError(f"{asked} must be on {device}, got {index_K.device}")
    if len(index_K) and (index_K.device.type == "cpu" if reads is None else reads):
        least, most = int(index_K.min()), int(index_K.max())
        if least < 0 or most >= size:
            raise PolicyError(f"{asked} must contain only numbers in [0, {size}), got {least if least < 0 else most}")
        if len(index_K.unique()) != len(index_K):
            raise PolicyError(f"{asked} must contain each number at most once")
    return index_K


def check_selection(asked: str, chosen: Selection | Split, grad_NO: Tensor) -> bool:
    """Refuse a selection that does not fit its gradient. Read its indices, unless the gradient has no data.

    Args:
        asked: As for :func:`require_type`.
        chosen: What it returned.
        grad_NO: The gradient.

    Returns:
        Whether values were read.

    Raises:
        PolicyError: If an index, a weight or a mask has another shape, dtype, device or range.
    """
    reads = not hasattr(grad_NO, "fake_mode") and not grad_NO.is_meta
    for part in (chosen.dgrad, chosen.wgrad) if isinstance(chosen, Split) else (chosen,):
        name, size = f"{asked}: index_K of {type(part).__name__}", _count_places(part, grad_NO)
        if isinstance(part, Rows | Columns | Elements | Blocks) and size is not None:
            require_index(name, part.index_K, size, grad_NO.device, reads=reads)
            if not isinstance(part, Elements) and part.weight_K is not None:
                _require_shape(f"{asked}: weight_K of {type(part).__name__}", part.weight_K, part.index_K.shape)
        elif isinstance(part, TwoToFour | Groups | Values):
            field, value = next(iter(vars(part).items()))
            _require_shape(f"{asked}: {field} of {type(part).__name__}", value, grad_NO.shape)
    return reads


def require_token_choice(asked: str, value: object, like_BT: Tensor) -> None:
    """Refuse what is not a valid :class:`TokenChoice` of a batch's positions.

    Args:
        asked: As for :func:`require_type`.
        value: What it returned.
        like_BT: A tensor of the batch's shape.

    Raises:
        PolicyError: If a field has another type, shape or dtype.
    """
    import torch

    require_type(asked, value, TokenChoice)
    assert isinstance(value, TokenChoice)
    for name, mask in (("trained_BT", value.trained_BT), ("carries_BT", value.carries_BT)):
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != like_BT.shape:
            wanted = f"torch.bool of shape {tuple(like_BT.shape)}"
            raise PolicyError(f"{asked}: {name} of TokenChoice must be {wanted}, got {_describe(mask)}")


def _count_places(part: Selection | None, grad_NO: Tensor) -> int | None:
    match part:
        case Rows() | Columns():
            return grad_NO.shape[0 if isinstance(part, Rows) else 1]
        case Elements():
            return grad_NO.numel()
        case Blocks():
            return math.prod(part.grid(grad_NO))
    return None


def _require_shape(asked: str, value: object, shape: torch.Size) -> None:
    if getattr(value, "shape", None) != shape:
        raise PolicyError(f"{asked} must have the shape {tuple(shape)}, got {_describe(value)}")


def _describe(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None or dtype is None else f"{dtype} of shape {tuple(shape)}"
