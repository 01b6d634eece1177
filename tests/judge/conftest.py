"""The command line of judges as real processes, with a worker that trains nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAKE = [sys.executable, "-m", "fake_judge"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the command line to its end."""

    def run(*words: object, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*FAKE, *map(str, words)],
            check=False, capture_output=True, text=True, timeout=500, cwd=cwd, env=environment(),
        )  # fmt: skip

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command line and go on."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*words: object, cwd: Path = tmp_path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*FAKE, *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment(),
            start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()
