"""Repair a sqlite store that was moved together with its artifacts.

MLflow stores the artifacts' absolute path in its database, for each experiment and run, and has no command to change
it. So a home that was renamed, copied, or reached by a vanished link could neither receive runs nor show its files.
SparseBP keeps the artifacts of a sqlite store beside its file. If the database names another path and that path is
gone, the paths are rewritten.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

PLACES = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
BUSY_SECONDS = 20.0


def follow_move(database: Path, root: Path) -> None:
    """Rewrite artifact paths in a database to ``root``, the artifact folder beside it. Rewrite only folders of the same
    name that are gone. The caller holds the store's lock. A file that is not an MLflow database is left unchanged."""
    try:
        with closing(sqlite3.connect(database, timeout=BUSY_SECONDS)) as connection:
            query = "SELECT DISTINCT artifact_location FROM experiments"
            locations = [str(row[0]) for row in connection.execute(query)]
            for old in set(_find_gone(locations, root)):
                with connection:  # both tables, or neither
                    for table, column in PLACES:
                        # Do not use LIKE: a path may contain its wildcards.
                        connection.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                            f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                            (root.as_uri(), len(old) + 1, old, len(old) + 1, f"{old}/"),
                        )
    except sqlite3.Error:
        return  # MLflow reports what is wrong with it


def _find_gone(locations: list[str], root: Path) -> Iterator[str]:
    """Yield the addresses of vanished folders named like ``root``, which ``root`` replaces."""
    for location in locations:
        before, name, rest = location.rpartition(f"/{root.name}")
        if not name or (rest and not rest.startswith("/")) or not location.startswith("file:///"):
            continue
        old = Path(url2pathname(urlsplit(before + name).path))
        # If neither folder exists, nothing was stored yet. Then rewrite only if the whole old home is gone.
        if old != root and not old.exists() and (root.exists() or not old.parent.exists()):
            yield before + name
