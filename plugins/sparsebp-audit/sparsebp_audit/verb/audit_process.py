"""Run a command with each of its Python processes audited, and read the reports that they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sparsebp_audit.report import AuditReport
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.errors import UsageError

SITE = Path(str(files("sparsebp_audit"))) / "process" / "site"


@dataclass(frozen=True)
class AuditedCommand:
    """The outcome of an audited command."""

    exit_code: int  # its own; 128 plus the signal's number if a signal ended it
    report: AuditReport | None  # of the first process that trained; None without one
    why_no_report: str = ""  # one line, if there is no report
    script: Path | None = None  # the training script; None if it was no file


def run_audited(
    command: list[str], settings: Mapping[str, float], place: Path, give: Callable[[AuditReport], None], *, quiet: bool
) -> AuditedCommand:
    """Run a command to its end. ``settings`` are ``steps``, ``threshold``, ``stop``, ``apply`` and ``examples``; its
    processes write to the empty folder ``place``. ``give`` gets the first rank's report as soon as it exists, with
    ``apply`` at the end; at the end another rank's, if only that exists. ``quiet`` sends its standard output to
    standard error. Raises ``UsageError`` if there is no such program."""
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
            raise UsageError(f"cannot start {command[0]}: {error.strerror}{hint}") from None
        report, num_handled = None, 0
        try:
            while (code := _poll(process)) is None:
                if report is None and not settings["apply"] and (report := _read(found, "report-0-*.json")):
                    give(report)
                if interrupts.received[num_handled:]:
                    num_handled = len(interrupts.received)
                    if interrupts.received[-1] == signal.SIGTERM:  # the terminal sends Ctrl-C to the command too
                        process.terminate()
        except BaseException:  # such as a closed pipe: do not leave the command running unattended
            process.terminate()
            raise
    if report is None and (report := _read(found, "report-*.json")) is not None:
        give(report)
    why = "" if report is not None else _why_no_report(found, command, code, int(settings["steps"]))
    scripts = _by_rank(found, "script-*")
    return AuditedCommand(code, report, why, Path(scripts[0].read_text(encoding="utf-8")) if scripts else None)


def _poll(process: subprocess.Popen[bytes]) -> int | None:
    try:
        code = process.wait(0.1)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def _read(found: Path, pattern: str) -> AuditReport | None:
    """Return the report of the lowest rank."""
    reports = _by_rank(found, pattern)
    return AuditReport.from_dict(json.loads(reports[0].read_text(encoding="utf-8"))) if reports else None


def _by_rank(found: Path, pattern: str) -> list[Path]:
    return sorted(found.glob(pattern), key=lambda file: [int(number) for number in file.stem.split("-")[1:]])


def _why_no_report(found: Path, command: list[str], code: int, steps: int) -> str:
    failed = next(iter(sorted(found.glob("failed-*"))), None)
    if failed is not None:
        lines = failed.read_text(encoding="utf-8").strip().splitlines()
        return f"the training could not be watched: {lines[-1] if lines else 'no reason was given'}"
    name = Path(command[0]).name
    seen = max((int(file.read_text(encoding="utf-8")) for file in found.glob("steps-*")), default=0)
    if seen:
        return f"{name} ended with exit code {code} after {seen} of {steps} steps, before it could write its report"
    if any(found.glob("idle-*")) and code:
        return f"{name} ended with exit code {code} before its first backward pass"
    if any(found.glob("idle-*")):
        return f"the audit saw no backward pass of {name}: there is nothing to audit"
    nothing = "ran no Python that the audit could watch (python -I, -E and -S disable the audit)"
    if any(found.glob("python-*")):
        nothing = "ran no Python that imports torch"
    ended = f"ended with exit code {code} before it could be watched" if code else nothing
    return f"{name} {ended}: there is nothing to audit"
