"""Compare versions, GPUs and disk space that a target's Python reports with ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.engine_word import TOOLKIT

PACKAGES = ("sparsebp", "torch", "transformers", "accelerate", "peft", "datasets")
LITTLE_SPACE = 5e9

# Prints one line of JSON. It is passed to a shell as one quoted word.
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


def compare_environment(answer: str, *, num_gpus: int) -> Iterator[CheckResult]:
    """Yield results for Python, packages, GPUs and disk from :data:`SOURCE`'s output. A run requests ``num_gpus``."""
    try:
        # Use the last line: a login shell may print before it.
        there = json.loads(answer.strip().splitlines()[-1])
        python, packages, gpus, free = there["python"], there["packages"], there["gpus"], float(there["free"])
    except (ValueError, IndexError, KeyError, TypeError):
        yield CheckResult(
            "fail", "python", f"the packages installed there cannot be listed, got {answer.strip()[-200:]!r}"
        )
        return
    yield CheckResult("ok", "python", str(python))
    yield _compare_packages(packages)
    if num_gpus and not gpus:
        yield CheckResult("fail", "GPUs", "the worker found none", f"check the driver of that machine, or {TOOLKIT}")
    elif num_gpus > len(gpus):
        yield CheckResult("fail", "GPUs", f"{len(gpus)} found by the worker, {num_gpus} requested", "see target.gpus")
    else:
        yield CheckResult("ok", "GPUs", ", ".join(gpus) or "none requested")
    few = free < LITTLE_SPACE
    yield CheckResult("warn" if few else "ok", "disk", f"{free / 1e9:.0f} GB free for runs")


def _compare_packages(there: dict[str, str]) -> CheckResult:
    if not there.get("sparsebp"):
        return CheckResult("fail", "packages", "sparsebp is not installed there", "check target.python, or the image")
    differing = [
        f"{name} {there.get(name) or 'missing'} (here {_version(name)})"
        for name in PACKAGES
        if there.get(name) != _version(name)
    ]
    if differing:
        hint = "results may differ in the last digits; another version of sparsebp may refuse the plan"
        return CheckResult("warn", "packages", f"other versions than here: {', '.join(differing)}", hint)
    return CheckResult("ok", "packages", f"same versions as here: sparsebp {there['sparsebp']}, torch {there['torch']}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
