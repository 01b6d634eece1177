"""Decide from its text alone whether an MLflow store's address is accepted, so that a wrong one is refused early."""

from __future__ import annotations

from pathlib import Path

from sparsebp_cli.run.visible import mask

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
SERVERS = ("http", "https")
EXAMPLE = "sqlite:////absolute/path/mlflow.db"


def find_problem(uri: str) -> str:
    """Return what is wrong with an address, without its password; empty if it is usable. Usable addresses are those of
    a server, or of a database; the path of an sqlite file must be absolute."""
    scheme = uri.split("://", 1)[0].split("+", 1)[0].lower() if "://" in uri else ""
    if scheme not in DATABASES + SERVERS:
        return (
            f"must be a server (http, https) or a database ({', '.join(DATABASES)}), got {mask(uri)!r}: MLflow's file "
            f"stores lose concurrent writes; use {EXAMPLE}"
        )
    if scheme == "sqlite" and not sqlite_file(uri).is_absolute():
        return f"must name an absolute file, got {mask(uri)!r}: use {EXAMPLE}"
    return ""


def sqlite_file(uri: str) -> Path:
    """Return the file of a ``sqlite:///`` URI. The path is relative if the URI's path is."""
    return Path(uri.partition("://")[2].removeprefix("/").partition("?")[0])
