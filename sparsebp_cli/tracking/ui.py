"""How a user opens MLflow's own pages on a store."""

from __future__ import annotations

import shlex

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import is_server, is_sqlite, resolve_uri


def describe_pages() -> str:
    """Return one line that says how to open MLflow's pages on this machine's store, its password hidden; empty where
    nothing was sent to it yet or its address cannot be used."""
    try:
        uri = resolve_uri(None)
    except TrackingError:
        return ""
    if is_server(uri):
        return f"MLflow's pages: {mask(uri)}"
    if is_sqlite(uri) and not sqlite_file(uri).exists():
        return ""
    return f"MLflow's pages: {shlex.join(('mlflow', 'server', '--workers', '1', '--backend-store-uri', mask(uri)))}"
