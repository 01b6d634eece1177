"""The command that serves a store through MLflow's own pages."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from sparsebp_cli import interpreter
from sparsebp_cli.errors import TrackingError
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import VIEW, artifact_root, is_server, is_sqlite, mend_places, open_client


def ui_command(uri: str, port: int = 5000) -> list[str]:
    """Return the command that serves a store's pages on 127.0.0.1; a missing sqlite database is created. Run it with
    :func:`ui_environment` added to the environment. Raises ``TrackingError`` for a server, which has its own pages, and
    for a database with a password, which the list of processes would show."""
    if is_server(uri):
        raise TrackingError(f"the tracking store is a server: open {mask(uri)} in a browser")
    if mask(uri) != uri:
        raise TrackingError(
            f"{mask(uri)} has a password, which every user of this machine would see: start mlflow yourself"
        )
    if is_sqlite(uri):
        _check_owner(sqlite_file(uri))
        open_client(uri)
        mend_places(uri)
    return interpreter.command(
        "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        # A page of another site may resolve its own name to 127.0.0.1 later; its requests still carry that name.
        "--allowed-hosts", f"127.0.0.1:{port},localhost:{port}",
        "--backend-store-uri", uri, "--artifacts-destination", str(artifact_root(uri)),
    )  # fmt: skip


def runs_page(address: str, uri: str) -> str:
    """Return the address of the list of runs of the experiment that was written last; of the start page for a store
    without runs. ``address`` is that of a server on the store ``uri``."""
    client = open_client(uri)
    experiments = [str(found.experiment_id) for found in client.search_experiments()]
    newest = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    if not newest:
        return address
    return (
        f"{address}/#/experiments/{newest[0].info.experiment_id}/runs"
        f"?workflowType=machine_learning&viewStateShareKey={VIEW}"
    )


def find_port(wanted: int | None, first: int = 5000) -> int:
    """Return a free port of 127.0.0.1: the wanted one; with None ``first``, or else any. Raises ``TrackingError`` if
    another process has the wanted one."""
    for port in (wanted,) if wanted is not None else (first, 0):
        with socket.socket() as probe:
            # As servers do: a port that one has just left counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    holder = find_listener(wanted or first)
    raise TrackingError(f"port {wanted} of 127.0.0.1 is taken by {holder or 'another process'}; leave --port out")


def find_listener(port: int) -> str:
    """Describe the process that listens on a port; empty where there is none or its owner is another user."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                return f"process {process.pid} ({process.name()}) of {process.username()}"
    return ""


def is_listening(pid: int, port: int) -> bool:
    """Whether a process or one of its children listens on a port."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            listening = (each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
            if any(each.laddr[1:] == (port,) for each in listening):
                return True
    return False


def _check_owner(file: Path) -> None:
    if file.exists() and file.stat().st_uid != os.getuid() and not is_shared():
        raise TrackingError(
            f"{file} belongs to another user, and so does what its pages show; SPARSEBP_SHARED=1 opens it all the same"
        )


def ui_environment() -> dict[str, str]:
    """Return the server's extra environment: no job workers (they take 1 GB), no telemetry."""
    return {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "PYTHONSAFEPATH": "1",  # keeps its child processes from importing modules of the working folder
    }
