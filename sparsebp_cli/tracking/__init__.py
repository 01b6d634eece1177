"""Sends journals to MLflow; repeated or partial sending ends in the same table. Only functions import mlflow."""

from sparsebp_cli.tracking.flush import Flusher, sync
from sparsebp_cli.tracking.follow import Follower
from sparsebp_cli.tracking.sent import SyncResult
from sparsebp_cli.tracking.ui import ui_command, ui_environment
from sparsebp_cli.tracking.uri import resolve_uri

__all__ = ["Flusher", "Follower", "SyncResult", "resolve_uri", "sync", "ui_command", "ui_environment"]
