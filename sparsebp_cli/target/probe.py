"""Asks a Python elsewhere what is installed there, and says how it differs from here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from sparsebp_cli.target.contract import Finding

PACKAGES = ("sparsebp", "torch", "transformers", "accelerate", "peft", "datasets")
LITTLE_SPACE = 5e9

# One line, no quotes that a shell could eat; prints one line of JSON.
SOURCE = f"""
import json, platform, shutil, subprocess, sys
from importlib.metadata import PackageNotFoundError, version
def find(name):
    try: return version(name)
    except PackageNotFoundError: return ""
def list_gpus():
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try: done = subprocess.run(asked, capture_output=True, text=True)
    except OSError: return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
print(json.dumps({{"python": platform.python_version(), "packages": {{name: find(name) for name in {PACKAGES!r}}},
                  "gpus": list_gpus(), "free": shutil.disk_usage(sys.argv[1]).free}}))
"""


def compare(answer: str, *, wants_gpus: bool) -> Iterator[Finding]:
    """Say what a probe found.

    Args:
        answer: What :data:`SOURCE` printed.
        wants_gpus: Whether the target asks for GPUs.

    Yields:
        Python, packages, GPUs, disk.
    """
    try:
        there = json.loads(answer.strip().splitlines()[-1])
        python, packages, gpus, free = there["python"], there["packages"], there["gpus"], float(there["free"])
    except (ValueError, IndexError, KeyError, TypeError):
        yield Finding("fail", "python", f"it cannot be asked what is installed there: {answer.strip()[-200:]!r}")
        return
    yield Finding("ok", "python", str(python))
    yield _compare_packages(packages)
    if wants_gpus and not gpus:
        yield Finding("fail", "GPUs", "none seen by the worker", "see the driver and the container toolkit there")
    else:
        yield Finding("ok", "GPUs", ", ".join(gpus) or "none asked for")
    few = free < LITTLE_SPACE
    yield Finding("warn" if few else "ok", "disk", f"{free / 1e9:.0f} GB free for runs")


def _compare_packages(there: dict[str, str]) -> Finding:
    if not there.get("sparsebp"):
        return Finding("fail", "packages", "sparsebp is not installed there", "see target option python, or the image")
    differing = [
        f"{name} {there.get(name) or 'missing'} (here {_version(name)})"
        for name in PACKAGES
        if there.get(name) != _version(name)
    ]
    if differing:
        hint = "results may differ in the last digits; a plan of another sparsebp may be refused"
        return Finding("warn", "packages", f"differ from here: {', '.join(differing)}", hint)
    return Finding("ok", "packages", f"as here: sparsebp {there['sparsebp']}, torch {there['torch']}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
