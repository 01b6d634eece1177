"""PUBLIC. The entry of a tracker: another program that shows runs beside MLflow, as the group ``sparsebp.trackers``
names it. It is given the journal of a run, while the run lives or later. Importing this package imports none of them.
"""

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
