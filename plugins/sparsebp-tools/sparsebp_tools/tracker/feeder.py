"""The tool ``trackers`` of the entry-point group ``sparsebp.tools``: functions that the core calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsebp_cli.run import RunFolder
from sparsebp_tools.tracker.door import DoorThread, send_to
from sparsebp_tools.tracker.suite import check_tracker

__all__ = ["check_tracker", "send_to", "start_threads"]


def start_threads(run: RunFolder, names: Sequence[str], every: float, warn: Callable[[str], None]) -> list[DoorThread]:
    """Start a thread for each tracker, so that none waits for another."""
    doors = [DoorThread(run, name, every, warn) for name in dict.fromkeys(names)]
    for door in doors:
        door.start()
    return doors
