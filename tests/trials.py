"""Counts the trials behind each promise: ``pytest -m promise --trials=FILE`` writes what was tried and what failed.
(With a space before FILE, pytest takes the file for the tests to run, before it has read what the option is.)

A test marked ``promise("R12")`` is one trial of promise R12, and a failure of it where it fails. A test that makes many
trials says how many by ``record_property("trials", 1000)``, and what kind some of them
were by ``record_property("of which", ("inside a save", 160))``. The page of promises is generated from the file, and
marks the counts of code that has changed since.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("sparsebp", "torch", "transformers", "mlflow", "pydantic")
# The folders and files of sparsebp_cli that keep each promise. A count is of what they were.
TRAINS, KEEPS = ("worker", "run"), ("run",)
COVERED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("R7", "R9", "R17", "R24", "R25", "R38"), TRAINS),
    **dict.fromkeys(("R1", "R2", "R4", "R16", "R23"), (*TRAINS, "backward", "policies")),  # under each policy
    "R3": (*TRAINS, "backward", "policies", "target"),
    **dict.fromkeys(("R26", "R27", "R39"), (*TRAINS, "target")),
    **dict.fromkeys(("R5", "R6"), ("tracking", "run")),
    **dict.fromkeys(("R10", "R28", "R30"), ("target", *KEEPS)),
    **dict.fromkeys(("R14", "R15", "R19", "R21", "R29"), ("target",)),
    **dict.fromkeys(("R11", "R33"), ("recipe",)),
    "R12": ("source", "worker", "target", "run"),
    "R13": ("plan", "recipe", "target", "tracking", "worker"),
    **dict.fromkeys(("R18", "R36"), ("backward", "policies", "policy")),
    "R34": ("backward", "policies", "policy", "trainer", "worker"),
    "R20": ("plan/repository.py", "run/interpreter.py", "cli"),
    "R22": (*KEEPS, "compare", "cli"),
    "R31": ("cli", "recipe", "run", "target", "worker", "errors.py"),
    "R32": ("source", "run", "target", "compare"),
    "R35": ("policy", "backward"),
}


def find_digest(promise: str, root: Path = ROOT) -> str:
    """Return a digest of the code that keeps a promise."""
    found = hashlib.sha256()
    for name in COVERED[promise]:
        place = root / "sparsebp_cli" / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def find_commit() -> str:
    """Return the commit that is tried, with ``+`` behind it if files differ from it; nothing without a history."""
    asked = (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "sparsebp_cli"])
    commit, changed = (
        subprocess.run(["git", "-C", str(ROOT), *words], check=False, capture_output=True, text=True).stdout.strip()
        for words in asked
    )
    return commit + "+" * bool(changed)


def is_built_for_cuda() -> bool:
    """Whether this is PyTorch as pip gives it, on a machine without a GPU."""
    import torch

    return torch.version.cuda is not None and not torch.cuda.is_available()


# Promises about an environment: elsewhere their tests run like any other, and are no trials of them.
ENVIRONMENTS: dict[str, Callable[[], bool]] = {"R35": is_built_for_cuda}


class TrialCount:
    """The results of marked tests, gathered on the process that reports them."""

    def __init__(self, file: Path) -> None:
        """Start with nothing tried.

        Args:
            file: JSON file to write; promises that this session does not try keep what the file says of them.
        """
        self.file = file
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one test: what it did when it passed, that it failed in whichever phase."""
        given = list(report.user_properties)
        promises = [str(value) for name, value in given if name == "promise"]
        if not promises or (report.when != "call" and not (report.when == "setup" and not report.passed)):
            return  # one phase of a test counts: its call, or the setup that kept it from one
        trials = sum(int(str(value)) for name, value in given if name == "trials") or 1
        kinds = [value for name, value in given if name == "of which"]
        for promise in promises:
            row = self.found.setdefault(
                promise, {"trials": 0, "failures": 0, "skipped": 0, "of which": {}, "tests": []}
            )
            if report.skipped:
                row["skipped"] += 1
                continue
            row["trials"] += trials
            row["failures"] += int(report.failed)
            for kind, count in kinds:
                row["of which"][kind] = row["of which"].get(kind, 0) + count
            file = report.nodeid.partition("::")[0]
            if file not in row["tests"]:
                row["tests"].append(file)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if not self.found:
            return
        before = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        now = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
            "commit": find_commit(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        }
        rows = before | {name: row | now | {"digest": find_digest(name)} for name, row in self.found.items()}
        ordered = dict(sorted(rows.items(), key=lambda item: int(item[0].removeprefix("R"))))
        self.file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def add_option(parser: pytest.Parser) -> None:
    """Add ``--trials=FILE``."""
    parser.addoption("--trials", metavar="FILE", type=Path, help="write the trials of each promise to this JSON file")


def register(config: pytest.Config) -> None:
    """Count where ``--trials`` was given: on the controller of several workers, not in each of them."""
    if (file := config.getoption("--trials")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TrialCount(file))


def name_promises(items: Iterable[pytest.Item]) -> None:
    """Write the promise of each marked test into its report, unless this environment is not the promise's."""
    fits: dict[str, bool] = {}
    for item in items:
        for marker in item.iter_markers("promise"):
            for promise in marker.args:
                if promise not in fits:
                    fits[promise] = ENVIRONMENTS.get(promise, lambda: True)()
                if fits[promise]:
                    item.user_properties.append(("promise", promise))
