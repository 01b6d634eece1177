"""Starts the process that watches over runs, in a session of its own, and hears whether the first run was started."""

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
    """Start ``python -m MODULE OPTIONS RUN_FOLDER...`` and wait for its answer.

    Args:
        module: Calls :func:`answer` once, then :func:`leave_client`.
        options: For it.
        runs: The runs.

    Raises:
        SparseBPError: What the process answered with.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *options, *(str(run.path) for run in runs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # until it could start, or said why not; from then on it has a log of its own
        start_new_session=True,
    )
    text, _ = process.communicate()
    lines = text.decode(errors="replace").splitlines() or ["it ended without a word"]
    try:
        said = json.loads(lines[-1])
        kind, problem = str(said["error"]), str(said["text"])
    except (ValueError, TypeError, KeyError):
        kind, problem = "", lines[-1]
    if problem:
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, SparseBPError) and known is not SparseBPError:
            raise known(problem)
        raise RunFailedError(f"the run could not be started: {problem}")


def answer(error: Exception | None = None) -> None:
    """Tell the client that waits whether the first run was started.

    Args:
        error: Why not; None: it was.
    """
    text = "" if error is None else str(error) or type(error).__name__
    print(json.dumps({"error": type(error).__name__ if error else "", "text": text}), flush=True)


def leave_client(run: RunFolder) -> None:
    """From now on nobody reads the pipe: what is printed goes to a file of the run.

    Args:
        run: The run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with (run.path / "watcher.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def folders(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs of folders named on a command line."""
    return [RunFolder(path.absolute()) for path in paths]
