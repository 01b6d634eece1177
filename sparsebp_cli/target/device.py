"""The GPUs of this machine by nvidia-smi, which needs no import of torch."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_SECONDS = 20.0


def list_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty where it is not installed."""
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
    """Return the environment of each of several workers at once, so that they divide this machine's GPUs.

    Each mapping holds ``CUDA_VISIBLE_DEVICES``; it is empty for one worker alone or where there is no GPU.
    """
    if num_shares == 1:
        return [{}]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(number) for number in range(len(list_gpus()))]
    if not devices:
        return [{} for _ in range(num_shares)]
    shares = [devices[number::num_shares] or [devices[number % len(devices)]] for number in range(num_shares)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
