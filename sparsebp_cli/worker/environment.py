"""Describe packages, plug-ins, hardware and environment, without host names or users."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from sparsebp_cli.entry_point import entry_points, find_source, find_version
from sparsebp_cli.run import interpreter

PACKAGES = ("sparsebp", "torch", "transformers", "accelerate", "peft", "datasets", "numpy", "safetensors", "tokenizers")


def describe_environment() -> dict[str, object]:
    """Return the versions and hardware that another person needs to judge a run's numbers."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": ", ".join(gpus),
        "cuda": torch.version.cuda or "",
        "driver": _driver(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "plugins": {
            name: number
            for group in ("sparsebp.policies", "sparsebp.models", "sparsebp.datasets")
            for name, _, number in (find_source(entry).partition(" ") for entry in entry_points(group=group))
            if number and name != "sparsebp"
        },
        **interpreter.describe_variables(),
    }


def _driver() -> str:
    """Return the version of the NVIDIA kernel module; empty without one."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
