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
