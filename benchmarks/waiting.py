"""Finds out whether a step waits for the device, in three ways.

PyTorch warns or raises where it waits, and the driver's calls are counted. In the forward the warnings are counted,
because transformers itself reads once from the device whether sequences are packed. In the backward the first wait
raises. ``torch.cuda.set_sync_debug_mode`` does not cover ``torch.sparse``, as its documentation says; the profile does.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from sparsebp_cli.policy import EdgeRouter
from sparsebp_tools.bench.subject import Subject
from sparsebp_tools.bench.variant import Variant

WAITED = "called a synchronizing"  # how PyTorch's warning and error begin
CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


@dataclass(frozen=True)
class Waits:
    """The waits of one variant in a step.

    Args:
        label: Name of the variant in the table.
        is_engine: Whether it goes through the engine.
        known: Why it waits on purpose; empty when it should not.
        in_forward: Number of PyTorch's warnings that it waits.
        in_backward: PyTorch's error at the first wait; empty when there was none.
        calls: Synchronising calls of the driver in forward and backward, by name, including the profiler's own.
        slowest: Time on the device by kernel, in milliseconds: the largest of the step.
    """

    label: str
    is_engine: bool = True
    known: str = ""
    in_forward: int = 0
    in_backward: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Synchronising calls of all kinds."""
        return sum(self.calls.values())


def watch(subject: Subject, variant: Variant) -> Waits:
    """Run a step twice, in PyTorch's sync debug mode and under the profiler. The variant has run on the subject
    before.
    """
    in_forward, in_backward = _step_and_tell(subject, variant) if subject.device.type == "cuda" else (0, "")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (subject.device.type == "cuda")
    with variant.on(subject.model) as engine:
        subject.synchronize()
        with profile(activities=activities) as record:
            loss = subject.loss(variant)
            loss.backward() if engine is None else engine.backward(loss)
    del loss
    subject.drop_gradients()
    averages = record.key_averages()
    calls = Counter({event.key: event.count for event in averages if event.key in CALLS})
    kernels = {event.key[:80]: round(event.self_device_time_total / 1000, 3) for event in averages}
    slowest = sorted(kernels.items(), key=lambda item: -item[1])[:8]
    shown = {name: time for name, time in slowest if time > 0}
    return Waits(
        variant.label, variant.sites is not None, _reason(variant), in_forward, in_backward, dict(calls), shown
    )


def _reason(variant: Variant) -> str:
    """Return why a variant waits on purpose; empty for one that should not."""
    if isinstance(variant.policy, EdgeRouter):
        return "a router looks at sizes"
    return ""


def _step_and_tell(subject: Subject, variant: Variant) -> tuple[int, str]:
    """Return how often the forward waited, and the error at the first wait of the backward."""
    with variant.on(subject.model) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss = subject.loss(variant)
            in_forward = sum(WAITED in str(warning.message) for warning in caught)
            torch.cuda.set_sync_debug_mode("error")
            loss.backward() if engine is None else engine.backward(loss)
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            return in_forward, str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            subject.drop_gradients()
    return in_forward, ""
