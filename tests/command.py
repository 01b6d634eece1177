"""A command line of the tests as a real process: a module that puts a worker that trains nothing behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """``python -m MODULE``, where the module lies in a folder."""

    module: str
    folder: Path

    @property
    def words(self) -> list[str]:
        return [sys.executable, "-m", self.module]

    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.folder)}

    def run(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [*self.words, *map(str, words)],
            check=False, capture_output=True, text=True, timeout=500, cwd=cwd, env=self.environment(),
        )  # fmt: skip

    @contextmanager
    def starting(self, folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        """Yield what starts it, in this folder unless told, and goes on; whatever still runs at the end is killed."""
        processes: list[subprocess.Popen[str]] = []

        def begin(*words: object, cwd: Path = folder) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*self.words, *map(str, words)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=self.environment(),
                start_new_session=True,
            )  # fmt: skip
            processes.append(process)
            return process

        try:
            yield begin
        finally:
            for process in processes:
                process.kill()
                process.communicate()
