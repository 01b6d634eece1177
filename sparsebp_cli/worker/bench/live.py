"""The highest use of memory by tensors during one pass: by the device's own count, or on a CPU by its allocator's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """Return the highest use of memory beyond what was there before, what the run makes and keeps included.

    On a CPU PyTorch's allocator tells the profiler of every allocation and release. Memory that a library takes in its
    own way (packed matrices, threads' buffers) is not in it.

    Args:
        device: That computes.
        run: A pass; under the profiler, so never timed.

    Returns:
        Bytes; None on a device that tells nothing.
    """
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
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
