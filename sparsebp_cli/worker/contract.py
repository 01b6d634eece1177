"""Checks and closure handling that PyTorch's own optimizers perform, for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Run the closure of a step with gradients enabled and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_complex(parameters: Iterable[Tensor], name: str) -> None:
    """Raise ValueError for complex parameters, whose imaginary part would be dropped."""
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(f"{name} updates real numbers, got a parameter of {parameter.dtype}")


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raise UnsupportedError for the gradient of an embedding made with ``sparse=True``."""
    if gradient.is_sparse:
        raise UnsupportedError(f"{name} does not take sparse gradients: make the embedding with sparse=False")


def check_not_negative(values: Mapping[str, Any]) -> None:
    """Raise ValueError for an option, by name, that is not a number of 0 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
            raise ValueError(f"{name} must be a number of 0 or more, got {value!r}")
