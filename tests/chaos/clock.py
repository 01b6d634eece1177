"""The time of day of other processes, which jumps while they work."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("clock.c")
DAY = 86_400
SHIFTS = (0, -3600, 3 * 3600, -DAY, -400 * DAY, 20 * 365 * DAY)  # seconds; the last is of a clock that lost its battery

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the clock")


class Clock:
    """A clock for processes that are started with its variables."""

    def __init__(self, folder: Path) -> None:
        """Compile it, and begin with the right time."""
        library, self._shift = folder / "clock.so", folder / "shift"
        command = ["g++", "-x", "c", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self.jumps = 0
        self.set(0)
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}

    def set(self, seconds: int) -> None:
        """Let the time of day be so many seconds later than it is."""
        if not self._shift.exists():
            self._shift.write_bytes(bytes(8))
        with self._shift.open("r+b") as shift:
            shift.write(struct.pack("q", seconds))

    @contextmanager
    def jumping(self, chance: random.Random) -> Iterator[None]:
        """Let it jump some twenty times a second."""
        over = threading.Event()

        def jump() -> None:
            while not over.wait(chance.uniform(0.01, 0.1)):
                self.set(chance.choice(SHIFTS) + chance.randrange(-100, 100))
                self.jumps += 1

        thread = threading.Thread(target=jump)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.set(0)
