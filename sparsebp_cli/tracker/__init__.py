"""PUBLIC. Trackers: programs besides MLflow that show runs, registered in the entry-point group ``sparsebp.trackers``.
A tracker gets a run's event log, while the run is alive or later. Importing this package imports no tracker."""

from __future__ import annotations

from sparsebp_cli.tracker.contract import (
    TrackedRecord,
    TrackedRun,
    Tracker,
    TrackerSession,
    find_tracker,
    find_tracker_problems,
    list_trackers,
)

__all__ = [
    "TrackedRecord",
    "TrackedRun",
    "Tracker",
    "TrackerSession",
    "find_tracker",
    "find_tracker_problems",
    "list_trackers",
]
