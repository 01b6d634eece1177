"""Record Ctrl-C and SIGTERM instead of raising them, so that the worker can be stopped in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupts:
    """A context in which SIGINT and SIGTERM are only recorded. Each of them ends a wait at once."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._arrived = threading.Event()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def exit_code(self) -> int:
        """The exit code of a process ended by the first of these signals: 130 or 143; 0 without one."""
        return 128 + self.received[0] if self.received else 0

    def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until a signal arrives."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._arrived.set()
