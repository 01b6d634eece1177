"""Checks of the arguments of a :class:`~sparsebp_cli.backward.execution.grad_store.GradStore`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsebp_cli.errors import UsageError


def check_gradient(grad: object) -> None:
    """Raise :class:`UsageError` unless the value is a floating-point tensor, dense or in COO layout."""
    if not isinstance(grad, Tensor):
        raise UsageError(f"a gradient must be a tensor, got {type(grad).__name__}")
    check_dtype(grad.dtype)
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise UsageError(f"a gradient must have the layout torch.strided or torch.sparse_coo, got {grad.layout}")


def check_dtype(dtype: object) -> None:
    """Raise :class:`UsageError` unless the value is a floating-point or complex dtype."""
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"a gradient must have a floating-point or complex dtype, got {dtype}")


def check_max_norm(max_norm: object) -> None:
    """Raise :class:`UsageError` unless the value is a number above 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise UsageError(f"max_norm must be a number above 0, got {max_norm!r}")


def pair_up(outputs: object, grads: object) -> list[tuple[Tensor, Tensor | None]]:
    """Pair outputs with their gradients, and return the pairs that can be differentiated.

    A single gradient serves all outputs; None is for scalar outputs. Raises :class:`UsageError` if they do not fit, or
    nothing can be differentiated.
    """
    roots = _as_list(outputs, "outputs")
    given = [grads] * len(roots) if grads is None or isinstance(grads, Tensor) else _as_list(grads, "gradients")
    if len(roots) != len(given):
        raise UsageError(f"give one gradient for each output, got {len(roots)} outputs and {len(given)} gradients")
    pairs = list[tuple[Tensor, Tensor | None]]()
    for root, grad in zip(roots, given, strict=True):
        if not isinstance(root, Tensor):
            raise UsageError(f"each output to differentiate must be a tensor, got {type(root).__name__}")
        if grad is None and root.numel() != 1:
            raise UsageError(
                f"an output of shape {tuple(root.shape)} needs a gradient: only an output with one number needs none"
            )
        if grad is not None:
            check_gradient(grad)
            assert isinstance(grad, Tensor)
            if grad.shape != root.shape:
                raise UsageError(f"an output of shape {tuple(root.shape)} got a gradient of shape {tuple(grad.shape)}")
        if root.requires_grad:
            pairs.append((root, grad))
    if not pairs:
        raise UsageError("nothing to differentiate: no output depends on a leaf that requires grad")
    return pairs


def _as_list(value: object, what: str) -> list[object]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise UsageError(f"{what} must be a tensor or a sequence of tensors, got {type(value).__name__}")
    return list(value)
