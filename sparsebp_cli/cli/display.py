"""Display a run's progress: a live picture in a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Self, final

from sparsebp_cli.cli.progress import Progress
from sparsebp_cli.cli.screen import console, print_line
from sparsebp_cli.run.metric import EVAL_LOSS
from sparsebp_cli.run.record_type import Record

SECONDS_BETWEEN_LINES = 5.0


class Display(ABC):
    """A display of one run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def add(self, record: Record) -> None:
        """Add one record of the event log, and print its notes."""
        self.progress.add(record)
        if record["kind"] == "note" and record["level"] != "detail":
            self.print_text(record["text"] if record["level"] == "info" else f"{record['level']}: {record['text']}")

    @abstractmethod
    def print_text(self, text: str) -> None:
        """Print a line that stays on the screen."""

    @abstractmethod
    def refresh(self, waiting_for: str = "") -> None:
        """Show the current progress. ``waiting_for`` names what follows the last record, if anything."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


@final
class LiveDisplay(Display):
    """A picture at the bottom of the terminal that is redrawn."""

    def __enter__(self) -> Self:
        from rich.live import Live
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._live = Live(console=console(), transient=True, auto_refresh=True, refresh_per_second=8)
        self._live.start()
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_text(self, text: str) -> None:
        self._live.console.print(text)

    def refresh(self, waiting_for: str = "") -> None:
        self.progress.phase = waiting_for or self.progress.phase
        self._live.update(self.progress.picture(self._spinner))


@final
class PlainDisplay(Display):
    """Lines at the start, at every evaluation, and every few seconds."""

    def __enter__(self) -> Self:
        self._shown, self._last, self._evaluated = time.monotonic(), "", False
        name = f"{self.progress.name} {self.progress.run_id}"
        self.print_text(f"{name}: {self.progress.max_steps} steps; times of a step: forward/backward/optimizer in ms")
        return self

    def __exit__(self, *_: object) -> None:
        self._show()

    def add(self, record: Record) -> None:
        super().add(record)
        if record["kind"] == "metrics" and EVAL_LOSS.name in record["values"]:
            self._show()

    def print_text(self, text: str) -> None:
        print_line(text)

    def refresh(self, waiting_for: str = "") -> None:
        if not waiting_for and time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        if (line := self.progress.line()) != self._last:
            self._last = line
            self.print_text(line)


def make_display(progress: Progress) -> Display:
    """Return a live display for a terminal, otherwise a display of lines."""
    return LiveDisplay(progress) if console().is_terminal else PlainDisplay(progress)
