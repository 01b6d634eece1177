"""Rehearses the first step of a plan in a process of its own, which ends with all that it loaded."""

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
    """Return what a step costs against dense, and what choosing could gain at most; nothing is trained.

    Args:
        plan: Rehearsed on this machine, in one process, whatever its target is.

    Returns:
        One or two lines.

    Raises:
        UsageError: Model or data cannot be had as the recipe says.
        RunFailedError: The process failed.
    """
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        command = [*COMMAND, str(plan.save(Path(folder)))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunFailedError(f"the process that rehearses a step ended with {done.returncode}: {last}") from None
    if "error" in told:
        raise UsageError(told["error"]) if told["code"] == UsageError.exit_code else RunFailedError(told["error"])
    return [str(line) for line in told["lines"]]
