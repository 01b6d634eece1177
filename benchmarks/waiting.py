"""Does a step wait for the device? Two proofs: PyTorch raises where it would wait, and the driver's calls are counted.

``torch.cuda.set_sync_debug_mode`` does not cover ``torch.sparse``, as its documentation says; the profile does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from sparsebp_cli.worker.bench.subject import Subject
from sparsebp_cli.worker.bench.way import Way

CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


@dataclass(frozen=True)
class Waits:
    """What one way waits for in a step.

    Args:
        label: The way's.
        raised: What PyTorch said where it waited; empty when it did not.
        where: ``forward`` or ``backward``: in which of them; empty when in neither.
        calls: Synchronising calls of the driver in forward and backward, by name; the profiler's own are in it.
        slowest: Time on the device by kernel, in milliseconds: the largest of the step.
    """

    label: str
    raised: str = ""
    where: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Synchronising calls of all kinds."""
        return sum(self.calls.values())


def watch(subject: Subject, way: Way) -> Waits:
    """Run a step twice: where waiting raises, and under the profiler.

    Args:
        subject: What it runs on; the way has run on it before.
        way: How.

    Returns:
        What it waited for.
    """
    raised, where = _step_without_waiting(subject, way)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (subject.device.type == "cuda")
    with way.on(subject.model) as engine:
        subject.synchronize()
        with profile(activities=activities) as record:
            loss = subject.loss(way)
            loss.backward() if engine is None else engine.backward(loss)
    del loss
    subject.drop_gradients()
    averages = record.key_averages()
    calls = Counter({event.key: event.count for event in averages if event.key in CALLS})
    kernels = {event.key[:80]: round(event.self_device_time_total / 1000, 3) for event in averages}
    slowest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
    return Waits(way.label, raised, where, dict(calls), {name: time for name, time in slowest if time > 0})


def _step_without_waiting(subject: Subject, way: Way) -> tuple[str, str]:
    """Return what PyTorch raised where it waited, and in which phase; both empty when nothing did."""
    if subject.device.type != "cuda":
        return "", ""
    where = "forward"
    with way.on(subject.model) as engine:
        subject.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = subject.loss(way)
            where = "backward"
            loss.backward() if engine is None else engine.backward(loss)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return str(error).splitlines()[0], where
        finally:
            torch.cuda.set_sync_debug_mode("default")
            subject.drop_gradients()
    return "", ""
