"""Tell the user how to open MLflow's own pages on a store."""

from __future__ import annotations

import shlex

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.recipe.store_address import sqlite_file
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking.store import is_server, is_sqlite, resolve_uri


def describe_pages(port: int = 5000) -> str:
    """Return one line that says how to open MLflow's pages on this machine's store, with its password hidden. Return an
    empty text if nothing was sent yet or the store's address cannot be used."""
    try:
        uri = resolve_uri(None)
    except TrackingError:
        return ""
    if is_server(uri):
        return f"MLflow's pages: {mask(uri)}"
    if is_sqlite(uri) and not sqlite_file(uri).exists():
        return ""
    # DNS rebinding: another site may resolve its name to 127.0.0.1 later, but its requests still carry that name.
    hosts = f"127.0.0.1:{port},localhost:{port}"
    words = ("mlflow", "server", "--port", str(port), "--allowed-hosts", hosts, "--workers", "1")
    return f"MLflow's pages: {shlex.join((*words, '--backend-store-uri', mask(uri)))}"
