"""Which MLflow store is meant, and how it is named without giving away its password."""

from __future__ import annotations

import os
from pathlib import Path

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.run import home
from sparsebp_cli.run.visible import mask

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SERVERS = ("http", "https")
LONGEST_LINE = 300


def resolve_uri(plan_uri: str | None) -> str:
    """Return the address of the MLflow store.

    Args:
        plan_uri: The recipe's ``tracking.uri``; None asks ``MLFLOW_TRACKING_URI``, and without it the default is
            one sqlite database in the folder of SparseBP.

    Returns:
        A database's or a server's URI. It may hold a password: show it through :func:`mask` only.

    Raises:
        TrackingError: It is a folder, an unknown scheme, or a sqlite path that depends on the working folder.
    """
    uri = plan_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"
    scheme = uri.split("://", 1)[0].split("+", 1)[0].lower() if "://" in uri else ""
    if scheme not in DATABASES + SERVERS:
        raise TrackingError(
            f"tracking.uri must be a server (http, https) or a database ({', '.join(DATABASES)}), got {mask(uri)!r}: "
            "MLflow's file stores lose concurrent writes; use sqlite:////absolute/path/mlflow.db"
        )
    if scheme == "sqlite" and not sqlite_file(uri).is_absolute():
        raise TrackingError(
            f"tracking.uri must name an absolute file, got {mask(uri)!r}: use sqlite:////absolute/path/mlflow.db"
        )
    return uri


def is_server(uri: str) -> bool:
    """Whether the store is an MLflow server, not a database that is opened directly."""
    return uri.lower().startswith(SERVERS)


def is_sqlite(uri: str) -> bool:
    """Whether the store is one file."""
    return uri.lower().startswith("sqlite")


def sqlite_file(uri: str) -> Path:
    """Return the file of a ``sqlite:///`` URI; a relative path where the URI has one."""
    return Path(uri.partition("://")[2].removeprefix("/").partition("?")[0])


def artifact_root(uri: str) -> Path:
    """Return the folder for artifacts when the store is a database: MLflow's own default is the working folder.

    Args:
        uri: A database.

    Returns:
        ``mlartifacts`` beside the sqlite file, else in the folder of SparseBP.
    """
    return (sqlite_file(uri).parent if is_sqlite(uri) else home()) / "mlartifacts"


def one_line(error: BaseException) -> str:
    """Return what an error of MLflow, its client or its database says, in one masked line.

    Args:
        error: Anything that was raised.

    Returns:
        The first line that says something, at most 300 characters, or the error's class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return mask(lines[0])[:LONGEST_LINE] if lines else type(error).__name__
