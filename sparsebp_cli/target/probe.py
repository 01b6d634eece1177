"""The shell of another machine; and what the Python there answers: versions, GPUs and disk space, beside ours."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.tool import Tool, always

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


def compare_environment(answer: str, *, wants_gpus: bool) -> Iterator[CheckResult]:
    """Yield the results for Python, packages, GPUs and disk from the output of :data:`SOURCE`."""
    try:
        there = json.loads(answer.strip().splitlines()[-1])
        python, packages, gpus, free = there["python"], there["packages"], there["gpus"], float(there["free"])
    except (ValueError, IndexError, KeyError, TypeError):
        yield CheckResult(
            "fail", "python", f"the packages installed there cannot be listed, got {answer.strip()[-200:]!r}"
        )
        return
    yield CheckResult("ok", "python", str(python))
    yield _compare_packages(packages)
    if wants_gpus and not gpus:
        yield CheckResult("fail", "GPUs", "none seen by the worker", "see the driver and the container toolkit there")
    else:
        yield CheckResult("ok", "GPUs", ", ".join(gpus) or "none requested")
    few = free < LITTLE_SPACE
    yield CheckResult("warn" if few else "ok", "disk", f"{free / 1e9:.0f} GB free for runs")


def _compare_packages(there: dict[str, str]) -> CheckResult:
    if not there.get("sparsebp"):
        return CheckResult(
            "fail", "packages", "sparsebp is not installed there", "see target option python, or the image"
        )
    differing = [
        f"{name} {there.get(name) or 'missing'} (here {_version(name)})"
        for name in PACKAGES
        if there.get(name) != _version(name)
    ]
    if differing:
        hint = "results may differ in the last digits; a plan of another sparsebp may be refused"
        return CheckResult("warn", "packages", f"differ from here: {', '.join(differing)}", hint)
    return CheckResult("ok", "packages", f"as here: sparsebp {there['sparsebp']}, torch {there['torch']}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# ssh must never prompt. A user accepts a host key by hand, once; an unknown one is an error here.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15")
SSH_SILENCE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
BROKEN = 255  # ssh's own exit code


def shell_command(host: str | None, lines: str) -> list[str]:
    """Return the command that runs POSIX shell lines on ``ssh://[USER@]HOST[:PORT]``; None is this machine. ``exec sh``
    makes the lines independent of the user's login shell there."""
    if host is None:
        return ["sh", "-c", lines]
    return [*ssh_command(host), f"exec sh -c {shlex.quote(lines)}"]


def ssh_command(host: str) -> list[str]:
    """Return the words of ssh up to the remote command, for ``ssh://[USER@]HOST[:PORT]``."""
    place = urlsplit(host)
    port = ["-p", str(place.port)] if place.port else []
    user = f"{place.username}@" if place.username else ""
    return [*SSH, *SSH_SILENCE, *port, f"{user}{place.hostname}", "--"]


def make_tool(host: str | None, name: str) -> Tool:
    """Return the tool that runs commands of :func:`shell_command`; error lines call this machine ``name``."""
    return Tool(host or name, _is_refusal if host else always)


def _is_refusal(code: int, errors: str) -> bool:
    return code != BROKEN and not re.search(r"^kex_exchange_identification|^ssh: ", errors, re.MULTILINE)
