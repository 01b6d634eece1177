"""SIGTERM and SIGINT ask the worker to stop at the next step boundary; a second SIGINT stops it at once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import Self


@dataclass
class StopRequest:
    """Whether somebody asked for the end.

    Args:
        signal: The first signal that came; None while nobody asked.
    """

    signal: signal.Signals | None = None

    @classmethod
    def install(cls) -> Self:
        """Catch SIGTERM and SIGINT from now on.

        Returns:
            The request, filled in by the handler.
        """
        request = cls()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, request._receive)
        return request

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self.signal is not None and number == signal.SIGINT:
            os._exit(130)
        self.signal = self.signal or signal.Signals(number)


def tell_stop(number: signal.Signals, step: int) -> str:
    """Return the line with which a run that was asked to stop ends.

    Args:
        number: What asked.
        step: The last one that was made.

    Returns:
        The line.
    """
    return f"{number.name}: stopped after step {step}"


def find_signal(text: str) -> signal.Signals | None:
    """Return the signal that a line of :func:`tell_stop` names; None where it is no such line."""
    name = text.partition(":")[0]
    return signal.Signals[name] if name in signal.Signals.__members__ else None
