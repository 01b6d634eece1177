"""Seconds that a device spent, read from events on demand, so that the host does not wait for the device earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]


@final
@dataclass(frozen=True)
class DeviceSeconds:
    """A sum of times between events in a stream. ``float()`` waits for the last event."""

    known: float = 0.0
    spans: tuple[Span, ...] = ()  # spans that had not ended when they were added

    def __add__(self, other: DeviceSeconds | float) -> DeviceSeconds:
        """Return the sum. Ended spans become a number, so that the sum over a training holds few events."""
        if not isinstance(other, DeviceSeconds):
            return DeviceSeconds(self.known + other, self.spans)
        spans = (*self.spans, *other.spans)
        over = [span for span in spans if span[1].query()]
        open_spans = tuple(span for span in spans if span not in over)
        return DeviceSeconds(self.known + other.known + sum(map(_read, over)), open_spans)

    __radd__ = __add__

    def __float__(self) -> float:
        """Return the seconds."""
        for _, stop in self.spans:
            stop.synchronize()
        return self.known + sum(map(_read, self.spans))


def _read(span: Span) -> float:
    milliseconds: float = span[0].elapsed_time(span[1])
    return milliseconds / 1e3
