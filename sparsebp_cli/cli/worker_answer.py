"""Get an answer from a short worker process, which may load torch; the client does not."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_cli.run import home, interpreter

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan


def ask_worker(module: str, plan: Plan, what: str) -> dict[str, Any]:
    """Return a worker module's answer about a plan. The module always runs on this machine in one process, whatever the
    plan's target. ``what`` says in errors what the process does. Raise ``UsageError`` if model or data cannot be loaded
    as the recipe says, ``RunFailedError`` if the process failed."""
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        return ask(module, [plan.save(Path(folder))], what)


def ask(module: str, files: Sequence[Path], what: str) -> dict[str, Any]:
    """Do the same for a module whose arguments are files or folders, passed as absolute paths."""
    with tempfile.TemporaryDirectory(prefix="sparsebp-") as folder:
        command = interpreter.command("-m", f"sparsebp_cli.worker.{module}", *map(str, files))
        done = subprocess.run(
            command,
            env=interpreter.worker_environment(
                {"SPARSEBP_HOME": str(home())}
            ),  # a relative path is relative to this process
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RunFailedError(f"the process that {what} failed with exit code {done.returncode}: {last}") from None
    if "error" in answer:
        raise UsageError(answer["error"]) if answer["code"] == UsageError.exit_code else RunFailedError(answer["error"])
    return answer
