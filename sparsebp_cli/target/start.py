"""Starts a watcher or dispatcher in a session of its own, and reads from it whether the first run was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsebp_cli import errors
from sparsebp_cli.errors import RunFailedError, SparseBPError
from sparsebp_cli.run import RunFolder


def start_process(module: str, options: Sequence[str], runs: Sequence[RunFolder]) -> None:
    """Start ``python -m MODULE OPTIONS RUN_FOLDER...`` and wait until it reports the start of the first run. The module
    calls :func:`report_start` once, then :func:`leave_client`. An error that it reports is raised here."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *options, *(str(run.path) for run in runs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # until it has reported; from then on it writes to watcher.log
        start_new_session=True,
    )
    text, _ = process.communicate()
    lines = text.decode(errors="replace").splitlines() or ["it ended without any output"]
    try:
        report = json.loads(lines[-1])
        kind, problem = str(report["error"]), str(report["text"])
    except (ValueError, TypeError, KeyError):
        kind, problem = "", lines[-1]
    if problem:
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, SparseBPError) and known is not SparseBPError:
            raise known(problem)
        raise RunFailedError(f"the run could not be started: {problem}")


def report_start(error: Exception | None = None) -> None:
    """Report to the waiting client that the first run was started, or the error that prevented it."""
    text = "" if error is None else str(error) or type(error).__name__
    print(json.dumps({"error": type(error).__name__ if error else "", "text": text}), flush=True)


def leave_client(run: RunFolder) -> None:
    """Redirect this process's output to ``watcher.log`` of a run: nobody reads the pipe any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    with (run.path / "watcher.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def open_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs whose folders a command line names."""
    return [RunFolder(path.absolute()) for path in paths]
