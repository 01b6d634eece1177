"""The address of the MLflow store, and how to name it without its password."""

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
    """Return the URI of the MLflow store: of the recipe, else of ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in
    SparseBP's home. It may hold a password: show it through :func:`mask` only. Raises ``TrackingError`` for a folder,
    an unknown scheme, or a relative sqlite path."""
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
    """Whether the store is an MLflow server rather than a database that is opened directly."""
    return uri.lower().startswith(SERVERS)


def is_sqlite(uri: str) -> bool:
    """Whether the store is one file."""
    return uri.lower().startswith("sqlite")


def sqlite_file(uri: str) -> Path:
    """Return the file of a ``sqlite:///`` URI; a relative path where the URI has one."""
    return Path(uri.partition("://")[2].removeprefix("/").partition("?")[0])


def artifact_root(uri: str) -> Path:
    """Return the artifact folder of a database: ``mlartifacts`` next to the sqlite file, else in SparseBP's home.
    MLflow's own default is the working folder."""
    return (sqlite_file(uri).parent if is_sqlite(uri) else home()) / "mlartifacts"


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, masked, at most 300 characters; else its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return mask(lines[0])[:LONGEST_LINE] if lines else type(error).__name__
