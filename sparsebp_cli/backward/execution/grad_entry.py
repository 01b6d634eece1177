"""One gradient in a :class:`~sparsebp_cli.backward.execution.grad_store.GradStore`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Entry:
    """A gradient, and whether it is the store's own.

    Args:
        grad: The gradient.
        is_own: What was handed in may be used elsewhere, and autograd returns one tensor for two parameters where it
            can: such a gradient is never changed. What the store has computed itself is.
    """

    grad: Tensor
    is_own: bool = False

    def plus(self, grad: Tensor) -> Entry:
        """Return the sum, in this entry's own tensor where that can hold it.

        Args:
            grad: Of the same shape, on the same device.

        Returns:
            This entry or another.
        """
        fits = torch.result_type(self.grad, grad) == self.grad.dtype and self.grad.is_sparse == grad.is_sparse
        if self.is_own and fits:
            self.grad += grad
            return self
        first, second = (grad, self.grad) if self.grad.is_sparse else (self.grad, grad)  # sparse + dense is not built
        return Entry(first + second, is_own=True)

    def scale(self, factor: Tensor) -> None:
        """Multiply by one number, a tensor on any device."""
        factor = factor.to(self.grad.device)
        self.grad, self.is_own = self.grad.mul_(factor) if self.is_own else self.grad * factor, True

    def values(self) -> Tensor:
        """Return the entries that are stored: all of a dense gradient."""
        return self.grad.coalesce().values() if self.grad.is_sparse else self.grad
