"""Stop requests: SIGTERM and SIGINT stop the worker at the next step boundary, a second SIGINT at once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import Self


@dataclass
class StopRequest:
    """The first stop signal that the process received, None if there was none."""

    signal: signal.Signals | None = None

    @classmethod
    def install(cls) -> Self:
        """Handle SIGTERM and SIGINT from now on, and return the request that the handler fills in."""
        request = cls()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, request._receive)
        return request

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self.signal is not None and number == signal.SIGINT:
            os._exit(130)
        self.signal = self.signal or signal.Signals(number)


def stop_message(number: signal.Signals, step: int) -> str:
    """Return the final line of a run that a signal stopped after a step."""
    return f"{number.name}: stopped after step {step}"


def signal_of_message(text: str) -> signal.Signals | None:
    """Return the signal that a line of :func:`stop_message` names; None for any other line."""
    name = text.partition(":")[0]
    return signal.Signals[name] if name in signal.Signals.__members__ else None
