"""The command line of judges as real processes, with a worker that trains nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.command import Command

COMMAND = Command("fake_judge", Path(__file__).parent)
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the command line to its end."""
    return partial(COMMAND.run, cwd=tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command line and go on."""
    with COMMAND.starting(tmp_path) as begin:
        yield begin
