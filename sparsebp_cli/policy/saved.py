"""Compressed forms of a linear's input, saved for the gradient of its weight.

``restore`` defines what a form means: it returns the input with which the weight's gradient is computed. A faster
``multiply`` must equal the dense product with ``restore()``. The gradient of the linear's input does not need the form.

All forms have a fixed size, so that the host never waits for a count from the device.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import Tensor


class WeightProduct(ABC):
    """The memory layout of a linear's weight."""

    output_dim: int

    @abstractmethod
    def wgrad(self, grad_NO: Tensor, x_ND: Tensor) -> Tensor:
        """Return the weight's gradient in the layout of the weight."""


@dataclass(frozen=True)
class Saved(ABC):
    """The base class of compressed inputs of a linear.

    Args:
        shape: N and D of the input.
    """

    shape: tuple[int, int]

    @abstractmethod
    def restore(self) -> Tensor:
        """Return the approximate input, (N, D), in the dtype of the original."""

    def multiply(self, form: WeightProduct, grad_NO: Tensor) -> Tensor:
        """Return the weight's gradient from an output's gradient. This reference implementation uses ``restore()``.

        Args:
            form: The layout of the weight.
            grad_NO: Gradient of the linear's output.

        Returns:
            The gradient, in the layout of the weight.
        """
        return form.wgrad(grad_NO, self.restore())

    @classmethod
    def share(cls, budget: float, num_rows: int, num_features: int) -> float:  # noqa: ARG003 - for overrides
        """Return the multiplications of ``multiply``, as a fraction of the dense ones.

        Args:
            budget: The fraction that the policy declares, in (0, 1].
            num_rows: Rows of the input, N.
            num_features: Features of the input, D.

        Returns:
            The fraction; more than 1 if the form needs more multiplications.
        """
        return 1.0

    @property
    def units(self) -> tuple[int, int]:
        """(units that the form keeps, units of the input); (1, 1) for a form that keeps a part of every unit."""
        return 1, 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The saved tensors, in the order of the fields."""
        return self.pack()[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the saved tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @final
    def pack(self) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Saved]]:
        """Return the tensors, and a function without tensors that makes this object from them again."""
        import torch

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in values.items() if name not in tensors}
        return tuple(tensors.values()), partial(_unpack, type(self), tuple(tensors), rest)


def _unpack(
    form: type[Saved], names: tuple[str, ...], rest: Mapping[str, object], tensors: tuple[Tensor, ...]
) -> Saved:
    make: Callable[..., Saved] = form
    return make(**rest, **dict(zip(names, tensors, strict=True)))
