"""The state of one backward pass under eager update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebp_cli.backward.execution.eager.clipping import total_of
from sparsebp_cli.backward.observe.internals import count_sparse_bytes


@dataclass
class EagerPassState:
    """One backward pass while it runs."""

    finish: Callable[[Tensor, Tensor], None]  # called with a parameter whose gradient is complete, and its norm
    updates: bool = True  # whether `finish` changes the parameter
    early: bool = True  # call `finish` as soon as a gradient is complete; else after the pass
    done: set[Tensor] = field(default_factory=set)
    waiting: dict[Tensor, None] = field(default_factory=dict)
    norms: dict[Tensor, Tensor] = field(default_factory=dict)
    held: dict[Tensor, int] = field(default_factory=dict)  # bytes of gradients not finished yet
    bytes_now: int = 0
    bytes_most: int = 0

    def hold(self, parameter: Tensor) -> None:
        """Count the bytes of a parameter's gradient, if there is one."""
        if parameter.grad is not None and parameter not in self.held:
            self.held[parameter] = count_bytes(parameter.grad)
            self.bytes_now += self.held[parameter]
            self.bytes_most = max(self.bytes_most, self.bytes_now)

    def total(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of all finished gradients, summed in the order of ``parameters``; zero without any."""
        norms = [self.norms[p] for p in parameters if p in self.norms]
        return total_of(norms) if norms else torch.zeros(())


def count_bytes(gradient: Tensor) -> int:
    """Return the bytes of a gradient; for a sparse gradient of its values and indices."""
    return count_sparse_bytes(gradient) if gradient.is_sparse else gradient.nbytes


@contextmanager
def preserve_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Set ``.grad`` aside during a pass that only measures, and restore it afterwards.

    ``tensors`` accumulate gradients that no update frees: inputs, or parameters of other optimizers.
    """
    before = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
