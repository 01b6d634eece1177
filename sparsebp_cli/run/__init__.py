"""One run on disk: its folder, its state, its event log, and the names of its metrics."""

from sparsebp_cli.run.folder import RunFolder, create_run, find_deleted, find_run, home, keep_private, list_runs
from sparsebp_cli.run.journal import History, JournalWriter, read
from sparsebp_cli.run.record import State

__all__ = [
    "History",
    "JournalWriter",
    "RunFolder",
    "State",
    "create_run",
    "find_deleted",
    "find_run",
    "home",
    "keep_private",
    "list_runs",
    "read",
]
