"""Passes over one micro-batch beside training, dense or with the policy, that leave no trace.

Random generators, buffers, gradients, policy state and counters are put back, so a run with rehearsals equals one
without, bit for bit. Every pass starts from the same generators: dropout is the same in all of them.
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
from sparsebp_cli.worker.generators import capture_rng, restore_rng
from sparsebp_cli.worker.sharding import whole
from sparsebp_cli.worker.trainable import trainable_parameters

Way = Literal["dense", "policy"]


@dataclass(frozen=True)
class Outcome:
    """What one pass left.

    Args:
        gradients: Of every trained parameter, by name; None where none arrived.
        report: The engine's, of this pass alone.
    """

    gradients: dict[str, Tensor | None]
    report: Report


class Rehearsal:
    """A context manager; passes run inside, between two steps of training.

    Args:
        model: With the engine attached, in training mode, without gradients.
        engine: Attached to the model.
        forward: The loss of a micro-batch.
        backward: Differentiates it without the engine, as training without policies would.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> None:
        self.model, self.engine, self.forward, self._backward = model, engine, forward, backward

    def __enter__(self) -> Self:
        """Note what will be put back."""
        self._rng, self._trainable = capture_rng(), trainable_parameters(self.model, self.engine)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put everything back."""
        self._rewind()
        del self._buffers

    @contextmanager
    def on(self, way: Way, draw: int = 1, *, feedback: bool = True) -> Iterator[Callable[[Tensor], None]]:
        """Prepare one pass.

        Args:
            way: ``dense`` or ``policy``.
            draw: Of random policies, from 1; training's own is 0.
            feedback: Whether error feedback adds what training has cut.

        Yields:
            Callable[[Tensor], None]: What runs the backward. Gradients are dropped when the block ends.
        """
        self._rewind()
        if way == "dense":
            with self.engine.disabled():
                yield self._backward
        else:
            with self.engine.probing(draw, feedback=feedback):
                yield lambda loss: self.engine.backward(loss, self._backward)
        self._rewind()

    def run(self, way: Way, draw: int = 1) -> Outcome:
        """Run one pass.

        Args:
            way: ``dense`` or ``policy``.
            draw: Of random policies, from 1.

        Returns:
            What it left.
        """
        with self.on(way, draw) as backward:
            backward(self.forward())
            return self.outcome()

    def outcome(self) -> Outcome:
        """Return what the pass under way has left so far."""
        gradients = {name: None if p.grad is None else whole(p.grad) for name, p in self._trainable.items()}
        return Outcome(gradients, self.engine.report())

    def _rewind(self) -> None:
        restore_rng(self._rng)
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
