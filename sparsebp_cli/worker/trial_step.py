"""Trial steps: forward and backward over one micro-batch, dense or with the policies, that leave no trace in the run.

Random generators, buffers, gradients, policy state and counters are restored, so a run with trial steps equals one
without them, bit for bit. Every pass starts from the same generator states, so dropout masks are equal in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, Report
from sparsebp_cli.worker.rng_state import capture_rng, restore_rng
from sparsebp_cli.worker.sharding import full_tensor
from sparsebp_cli.worker.trainable import trainable_parameters

Mode = Literal["dense", "policy"]


@dataclass(frozen=True)
class PassResult:
    """Gradients of all trained parameters by name, None where none arrived, and the engine's report of one pass."""

    gradients: dict[str, Tensor | None]
    report: Report


class TrialStep:
    """A context manager, entered between two training steps, in which passes run. The model is in training mode and
    without gradients; ``forward`` returns the loss of a micro-batch, and ``backward`` differentiates it without the
    engine."""

    def __init__(
        self, model: nn.Module, engine: Engine, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> None:
        self.model, self.engine, self.forward, self._backward = model, engine, forward, backward

    def __enter__(self) -> Self:
        """Record the state to be restored."""
        self._rng, self._trainable = capture_rng(), trainable_parameters(self.model, self.engine)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore it."""
        self._rewind()
        del self._buffers

    @contextmanager
    def on(self, mode: Mode, draw: int = 1, *, feedback: bool = True) -> Iterator[Callable[[Tensor], None]]:
        """Prepare one pass and yield the function that runs its backward; gradients are dropped when the block ends.
        ``draw`` counts the draws of random policies from 1 (training uses 0); ``feedback`` is whether error feedback
        adds what earlier training steps have cut."""
        self._rewind()
        if mode == "dense":
            with self.engine.disabled():
                yield self._backward
        else:
            with self.engine.probing(draw, feedback=feedback):
                yield lambda loss: self.engine.backward(loss, self._backward)
        self._rewind()

    def run(self, mode: Mode, draw: int = 1) -> PassResult:
        """Run one pass and return its gradients and report."""
        with self.on(mode, draw) as backward:
            backward(self.forward())
            return self.result()

    def result(self) -> PassResult:
        """Return the gradients and the report of the current pass so far."""
        gradients = {name: None if p.grad is None else full_tensor(p.grad) for name, p in self._trainable.items()}
        return PassResult(gradients, self.engine.report())

    def _rewind(self) -> None:
        restore_rng(self._rng)
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
