"""Peak bytes of tensors during one pass, from the device's counter or, on a CPU, from the profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """Return the peak bytes of tensors during a pass beyond those allocated before, or None on a device without such a
    count. On a CPU the pass runs under the profiler, so it must not be timed; memory that libraries allocate themselves
    (packed matrices, buffers of threads) is not included."""
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
