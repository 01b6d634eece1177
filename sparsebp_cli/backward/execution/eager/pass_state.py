"""What is known of one backward pass while it runs, and what is told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebp_cli.backward.execution.eager.clipping import total_of


@dataclass
class EagerPassState:
    """One backward pass under way.

    Args:
        finishes: What is done with a complete gradient, given its norm.
        updates: Whether that changes the parameter.
        early: Whether that happens as soon as it is complete; else when the pass has ended.
    """

    finishes: Callable[[Tensor, Tensor], None]
    updates: bool = True
    early: bool = True
    done: set[Tensor] = field(default_factory=set)
    waiting: dict[Tensor, None] = field(default_factory=dict)
    norms: dict[Tensor, Tensor] = field(default_factory=dict)
    held: dict[Tensor, int] = field(default_factory=dict)
    bytes_now: int = 0
    bytes_most: int = 0

    def hold(self, parameter: Tensor) -> None:
        """Count a gradient that is there."""
        if parameter.grad is not None and parameter not in self.held:
            self.held[parameter] = count_bytes(parameter.grad)
            self.bytes_now += self.held[parameter]
            self.bytes_most = max(self.bytes_most, self.bytes_now)

    def total(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of all gradients that were finished.

        Args:
            parameters: In the order in which they are summed up.

        Returns:
            A tensor of no dimension; zero if there was no gradient.
        """
        norms = [self.norms[p] for p in parameters if p in self.norms]
        return total_of(norms) if norms else torch.zeros(())


def count_bytes(gradient: Tensor) -> int:
    """Return the bytes of a gradient; of a sparse one those of what it stores, indices too."""
    if gradient.is_sparse:  # autograd's are not coalesced
        return int(gradient._indices().nbytes + gradient._values().nbytes)  # noqa: SLF001 - others coalesce first
    return gradient.nbytes


@contextmanager
def preserve_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leave gradients as they are while a pass runs that only looks.

    Args:
        tensors: That collect gradients which nobody takes away, such as inputs, or parameters of other optimizers.

    Yields:
        None: As long as that pass runs.
    """
    before = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
