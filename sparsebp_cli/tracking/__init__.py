"""Send event logs to MLflow. Repeated or partial sending gives the same table. Only functions import mlflow."""

from sparsebp_cli.tracking.flush import Flusher, SyncResult, delete_record, sync
from sparsebp_cli.tracking.follow import Follower
from sparsebp_cli.tracking.store import resolve_uri
from sparsebp_cli.tracking.ui import describe_pages

__all__ = [
    "Flusher",
    "Follower",
    "SyncResult",
    "delete_record",
    "describe_pages",
    "resolve_uri",
    "sync",
]
