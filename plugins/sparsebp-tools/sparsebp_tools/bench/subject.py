"""The model and the batch with which all variants are timed and counted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparsebp_cli.backward import count_flops, saved_bytes
from sparsebp_tools.bench.variant import Variant


@dataclass(frozen=True)
class Pass:
    """Seconds of one training step by phase; ``processor`` is the CPU time of forward and backward."""

    forward: float
    backward: float
    optimizer: float
    processor: float

    @property
    def both(self) -> float:
        """Forward plus backward, the time that the speed-up limit refers to."""
        return self.forward + self.backward

    @property
    def step(self) -> float:
        """All three phases."""
        return self.both + self.optimizer

    def as_dict(self) -> dict[str, float]:
        """Return the phases, rounded to microseconds."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Count:
    """Counts of one pass: FLOPs, stored bytes and the policy's estimates."""

    forward_flops: int
    backward_flops: int  # counted, recomputation included
    dense_flops: float  # the engine's estimate for the sites' dense backward; 0 without an engine
    claimed_flops: float  # the policy's estimate of what remains of dense_flops
    saved_bytes: int  # kept between forward and backward
    peak_bytes: int | None  # beyond what was allocated before; None if unknown
    kept_share: float | None  # of the sites' gradient entries; None if no site had a decision


class Subject:
    """A model in training mode, a batch with labels, and an optimizer with learning rate 0, so that every variant
    computes the same gradients. ``autocast`` is the dtype of matmuls; None: the weights' dtype."""

    model: nn.Module
    batch: dict[str, Tensor]
    autocast: torch.dtype | None
    device: torch.device

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], autocast: torch.dtype | None = None) -> None:
        self.model, self.batch, self.autocast = model, dict(batch), autocast
        self.device = next(model.parameters()).device
        self._optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
        self._compiled: Any = None

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def loss(self, variant: Variant) -> Tensor:
        """Run the forward of a variant for which the model is prepared, and return the loss."""
        run: Callable[..., Any] = self.model
        if variant.compiler is not None:
            if self._compiled is None:
                self._compiled = torch.compile(self.model, backend=variant.compiler)
            run = self._compiled
        dtype, enabled = self.autocast or torch.bfloat16, self.autocast is not None
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            loss: Tensor = run(**self.batch).loss
        return loss

    def run(self, variant: Variant) -> Pass:
        """Time one training step, without preparing the model for the variant."""
        times, processor = list[float](), list[float]()

        def tick() -> None:
            self.synchronize()
            times.append(time.perf_counter())
            processor.append(time.process_time())

        with variant.on(self.model) as engine:
            tick()
            loss = self.loss(variant)
            tick()
            loss.backward() if engine is None else engine.backward(loss)
            tick()
            self._optimizer.step()
            tick()
        del loss
        self.drop_gradients()
        forward, backward, optimizer = (after - before for before, after in itertools.pairwise(times))
        return Pass(forward, backward, optimizer, processor[2] - processor[0])

    def count(self, variant: Variant) -> Count:
        """Count two passes; counters slow them, so they are never timed."""
        with variant.on(self.model) as engine:
            with count_flops() as forward, saved_bytes(self.model.parameters()) as saved:
                loss = self.loss(variant)
            stored = saved.total  # while the graph exists
            with count_flops() as backward:
                loss.backward() if engine is None else engine.backward(loss)
            claim = None if engine is None else engine.claim()
            kept = None if engine is None else engine.totals()[0]
        del loss
        self.drop_gradients()
        peak = peak_bytes(self.device, lambda: self.run(variant))
        return Count(
            forward_flops=forward.total,
            backward_flops=backward.total,
            dense_flops=0.0 if claim is None else claim.dense_flops,
            claimed_flops=0.0 if claim is None else claim.claimed_flops,
            saved_bytes=stored,
            peak_bytes=peak,
            kept_share=kept,
        )

    def count_memory(self, variant: Variant, like: Count) -> Count:
        """Return ``like`` with this variant's own peak memory. It is for compiled variants, which counters would
        change; their saved bytes are unknown and stay those of ``like``."""
        self.run(variant)  # the first run compiles
        return replace(like, peak_bytes=peak_bytes(self.device, lambda: self.run(variant)))

    def drop_gradients(self) -> None:
        """Drop the gradients, so that every pass allocates its own."""
        for parameter in self.model.parameters():
            parameter.grad = None


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """Return the peak bytes of tensors during a pass beyond those allocated before, or None on a device without such a
    counter. On a CPU the pass runs under the profiler, so it must not be timed. Memory that libraries allocate
    themselves (packed matrices, thread buffers) is not included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    assert record.profiler is not None
    # The profiler's public lists sum memory by operator; a peak needs the time of each allocation.
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
