"""What PyTorch's own optimizers do beside their arithmetic, and ours do as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Run the closure of a step.

    Args:
        closure: Computes the loss and its gradients; None: they are there.

    Returns:
        The loss, or None.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_complex(parameters: Iterable[Tensor], name: str) -> None:
    """Refuse parameters with a phase, which would be dropped.

    Args:
        parameters: That an optimizer is given.
        name: The optimizer's.

    Raises:
        ValueError: One is complex.
    """
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(f"{name} updates real numbers, got a parameter of {parameter.dtype}")


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Refuse the gradient of an embedding made with ``sparse=True``.

    Args:
        gradient: Of one parameter.
        name: The optimizer's.

    Raises:
        UnsupportedError: It is sparse.
    """
    if gradient.is_sparse:
        raise UnsupportedError(f"{name} does not take sparse gradients: make the embedding with sparse=False")


def check_not_negative(values: Mapping[str, Any]) -> None:
    """Refuse what is no number of 0 or more.

    Args:
        values: Options of an optimizer by name.

    Raises:
        ValueError: One is something else.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
            raise ValueError(f"{name} must be a number of 0 or more, got {value!r}")
