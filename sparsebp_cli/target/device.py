"""Which GPUs this machine has, without torch: asked of the driver's own tool."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_SECONDS = 20.0


def list_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi knows; none where there is no such tool."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def share_gpus(num_shares: int) -> list[dict[str, str]]:
    """Return what each of several workers finds in its environment, so that they share this machine's GPUs out.

    Args:
        num_shares: Workers at once, at least 1.

    Returns:
        One mapping a worker: ``CUDA_VISIBLE_DEVICES``, or nothing for one worker alone or where there is no GPU.
    """
    if num_shares == 1:
        return [{}]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(number) for number in range(len(list_gpus()))]
    if not devices:
        return [{} for _ in range(num_shares)]
    shares = [devices[number::num_shares] or [devices[number % len(devices)]] for number in range(num_shares)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
