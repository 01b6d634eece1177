"""Runs a command with every Python process of it watched, and takes in what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.errors import UsageError
from sparsebp_cli.finding import AuditReport

SITE = Path(str(files("sparsebp_cli"))) / "worker" / "audit" / "site"


@dataclass(frozen=True)
class Watched:
    """What became of a command.

    Args:
        exit_code: Its own; 128 and the signal's number when a signal ended it.
        report: Of the first process that trained; None without one.
        why_nothing: Without a report, why: one line.
    """

    exit_code: int
    report: AuditReport | None
    why_nothing: str = ""


def run_watched(
    command: list[str], settings: dict[str, Any], place: Path, give: Callable[[AuditReport], None], *, quiet: bool
) -> Watched:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        settings: ``steps``, ``threshold``, ``stop``.
        place: An empty folder for what its processes write.
        give: Called with the report as soon as there is one of the first rank, while the command goes on; at the end
            with that of another, if there is only such.
        quiet: Whether its standard output goes to standard error, so that ours is the report alone.

    Returns:
        What became of it.

    Raises:
        UsageError: There is no such program.
    """
    found = place / "found"
    found.mkdir()
    path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH", "")) if part)
    environment = os.environ | {
        "PYTHONPATH": path,
        "SPARSEBP_AUDIT_FOLDER": str(found),
        "SPARSEBP_AUDIT": json.dumps(settings),
    }
    with Interrupts() as interrupts:
        try:
            process = subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno() if quiet else None)
        except OSError as error:
            program = {".py": "python", ".sh": "bash"}.get(Path(command[0]).suffix)
            hint = f"; did you mean: {program} {command[0]}?" if program is not None else ""
            raise UsageError(f"{command[0]}: {error.strerror}{hint}") from None
        report, told = None, 0
        try:
            while (code := _poll(process)) is None:
                if report is None and (report := _read(found, "report-0-*.json")) is not None:
                    give(report)
                if interrupts.received[told:]:
                    told = len(interrupts.received)
                    if interrupts.received[-1] == signal.SIGTERM:  # Ctrl-C reaches the command by itself
                        process.terminate()
        except BaseException:  # such as a closed pipe: the command must not live on without anybody to wait for it
            process.terminate()
            raise
    if report is None and (report := _read(found, "report-*.json")) is not None:
        give(report)
    return Watched(code, report, "" if report is not None else _why_nothing(found, command, code, settings["steps"]))


def _poll(process: subprocess.Popen[bytes]) -> int | None:
    try:
        code = process.wait(0.1)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def _read(found: Path, pattern: str) -> AuditReport | None:
    """The report of the lowest rank."""
    reports = sorted(found.glob(pattern), key=lambda file: [int(number) for number in file.stem.split("-")[1:]])
    return AuditReport.from_dict(json.loads(reports[0].read_text(encoding="utf-8"))) if reports else None


def _why_nothing(found: Path, command: list[str], code: int, steps: int) -> str:
    failed = next(iter(sorted(found.glob("failed-*"))), None)
    if failed is not None:
        lines = failed.read_text(encoding="utf-8").strip().splitlines()
        return f"the training could not be watched: {lines[-1] if lines else 'no reason was given'}"
    name = Path(command[0]).name
    seen = max((int(file.read_text(encoding="utf-8")) for file in found.glob("steps-*")), default=0)
    if seen:
        return f"{name} ended with {code} after {seen} of {steps} steps, before it could write its report"
    if any(found.glob("idle-*")):
        return f"{name} ran no backward pass that could be seen: there is nothing to audit"
    nothing = "ran no Python that could be watched (python -I, -E and -S leave out what watches)"
    if any(found.glob("python-*")):
        nothing = "ran no Python that imports torch"
    ended = f"ended with {code} before it could be watched" if code else nothing
    return f"{name} {ended}: there is nothing to audit"
