"""The model and the batch that all ways take turns on, under the clock and under counters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import count_flops, saved_bytes
from sparsebp_cli.worker.bench.live import peak_bytes
from sparsebp_cli.worker.bench.way import Way


@dataclass(frozen=True)
class Pass:
    """Seconds of one training step, by phase; ``processor`` is forward and backward in seconds of processor time."""

    forward: float
    backward: float
    optimizer: float
    processor: float

    @property
    def both(self) -> float:
        """Forward plus backward: what the ceiling speaks of."""
        return self.forward + self.backward

    @property
    def step(self) -> float:
        """All three phases."""
        return self.both + self.optimizer

    def as_dict(self) -> dict[str, float]:
        """Return the phases, to a microsecond."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Count:
    """What one pass executes, stores and claims.

    Args:
        forward_flops: Executed.
        backward_flops: Executed, what is computed again included.
        dense_flops: The sites' dense backward, as the engine tells; 0 without one.
        claimed_flops: What the policy claims to leave of it.
        saved_bytes: Kept between forward and backward.
        peak_bytes: Highest use of tensors beyond what was there before; None where it is not known.
        kept_share: Of the sites' gradient entries; None where nothing was asked.
    """

    forward_flops: int
    backward_flops: int
    dense_flops: float
    claimed_flops: float
    saved_bytes: int
    peak_bytes: int | None
    kept_share: float | None


class Subject:
    """A model, a batch, and an optimizer that moves nothing, so that every way computes the same gradients.

    Args:
        model: Of transformers, in training mode.
        batch: Its arguments, labels included.
        autocast: Low precision in which matmuls run; None: as the weights are.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], autocast: torch.dtype | None = None) -> None:
        self.model, self.batch, self.autocast = model, dict(batch), autocast
        self.device = next(model.parameters()).device
        self._optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
        self._compiled: Any = None

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def loss(self, way: Way) -> Tensor:
        """Run the forward.

        Args:
            way: Which the model is prepared for.

        Returns:
            The loss.
        """
        run: Callable[..., Any] = self.model
        if way.compiler is not None:
            if self._compiled is None:
                self._compiled = torch.compile(self.model, backend=way.compiler)
            run = self._compiled
        dtype, enabled = self.autocast or torch.bfloat16, self.autocast is not None
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            loss: Tensor = run(**self.batch).loss
        return loss

    def run(self, way: Way) -> Pass:
        """Run one training step under the clock; preparing the model is not timed.

        Args:
            way: How.

        Returns:
            The seconds.
        """
        times, processor = list[float](), list[float]()

        def tick() -> None:
            self.synchronize()
            times.append(time.perf_counter())
            processor.append(time.process_time())

        with way.on(self.model) as engine:
            tick()
            loss = self.loss(way)
            tick()
            loss.backward() if engine is None else engine.backward(loss)  # type: ignore[no-untyped-call]
            tick()
            self._optimizer.step()
            tick()
        del loss
        self.drop_gradients()
        forward, backward, optimizer = (after - before for before, after in itertools.pairwise(times))
        return Pass(forward, backward, optimizer, processor[2] - processor[0])

    def count(self, way: Way) -> Count:
        """Run two passes under counters: they are slower, and never timed.

        Args:
            way: How.

        Returns:
            What was counted.
        """
        with way.on(self.model) as engine:
            with count_flops() as forward, saved_bytes(self.model.parameters()) as saved:
                loss = self.loss(way)
            stored = saved.total  # while the graph lives
            with count_flops() as backward:
                loss.backward() if engine is None else engine.backward(loss)  # type: ignore[no-untyped-call]
            claim = None if engine is None else engine.claim()
            kept = None if engine is None else engine.report().kept_share
        del loss
        self.drop_gradients()
        peak = peak_bytes(self.device, lambda: self.run(way))
        return Count(
            forward_flops=forward.total,
            backward_flops=backward.total,
            dense_flops=0.0 if claim is None else claim.dense_flops,
            claimed_flops=0.0 if claim is None else claim.claimed_flops,
            saved_bytes=stored,
            peak_bytes=peak,
            kept_share=kept,
        )

    def count_memory(self, way: Way, like: Count) -> Count:
        """Count memory alone, for a way that counters would change.

        Args:
            way: How.
            like: What it executes.

        Returns:
            That, with its own memory; what it saves is not known, and taken over as well.
        """
        self.run(way)  # compiles
        return replace(like, peak_bytes=peak_bytes(self.device, lambda: self.run(way)))

    def drop_gradients(self) -> None:
        """Forget the gradients, so that every pass makes its own."""
        for parameter in self.model.parameters():
            parameter.grad = None
