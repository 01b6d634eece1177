"""Rehearses the first step of a plan in a process of its own, which frees everything that it loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan

COMMAND = [sys.executable, "-m", "sparsebp_cli.worker.preview"]


def preview(plan: Plan) -> list[str]:
    """Return one or two lines: a step's cost against dense, and the largest possible gain of choosing. Nothing is
    trained.

    The plan is rehearsed on this machine in one process, whatever its target. Raises ``UsageError`` if model or data
    cannot be loaded as the recipe says, ``RunFailedError`` if the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        command = [*COMMAND, str(plan.save(Path(folder)))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunFailedError(f"the process that rehearses a step ended with {done.returncode}: {last}") from None
    if "error" in answer:
        raise UsageError(answer["error"]) if answer["code"] == UsageError.exit_code else RunFailedError(answer["error"])
    return [str(line) for line in answer["lines"]]
