"""The command that shows a store in MLflow's own pages."""

from __future__ import annotations

import sys

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import open_client
from sparsebp_cli.tracking.uri import artifact_root, is_server, is_sqlite


def ui_command(uri: str, port: int = 5000) -> list[str]:
    """Return the command that serves a store's pages on this machine only.

    Args:
        uri: The store, from ``resolve_uri``. A sqlite database that does not exist yet is created.
        port: On 127.0.0.1.

    Returns:
        Program and arguments, to be run with :func:`ui_environment` added to the environment.

    Raises:
        TrackingError: The store is a server, which has its own pages; or a database with a password, which would be
            shown in the list of processes.
    """
    if is_server(uri):
        raise TrackingError(f"the tracking store is a server: open {mask(uri)} in a browser")
    if mask(uri) != uri:
        raise TrackingError(
            f"{mask(uri)} has a password, which every user of this machine would see: start mlflow yourself"
        )
    if is_sqlite(uri):
        open_client(uri)
    return [
        sys.executable, "-P", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", uri, "--artifacts-destination", str(artifact_root(uri)),
    ]  # fmt: skip


def ui_environment() -> dict[str, str]:
    """Return what the server needs in its environment: no job workers (they take 1 GB), no telemetry."""
    return {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "PYTHONSAFEPATH": "1",  # it starts processes of its own; none takes modules from the working folder
    }
