"""Sends journals to MLflow and to trackers; repeated or partial sending ends in the same table. Only functions import
mlflow."""

from sparsebp_cli.tracking.door import send_to
from sparsebp_cli.tracking.flush import Flusher, SyncResult, delete_record, sync
from sparsebp_cli.tracking.follow import Follower
from sparsebp_cli.tracking.script_run import ScriptRun
from sparsebp_cli.tracking.store import resolve_uri
from sparsebp_cli.tracking.ui import describe_pages

__all__ = [
    "Flusher",
    "Follower",
    "ScriptRun",
    "SyncResult",
    "delete_record",
    "describe_pages",
    "resolve_uri",
    "send_to",
    "sync",
]
