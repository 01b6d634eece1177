"""A sqlite store that was moved with its artifacts.

MLflow keeps the absolute place of the artifacts in its database, for each experiment and run, and has no command that
changes it. So a home that was renamed, copied or reached by a link that is gone could neither be sent to again nor show
its files. SparseBP puts the artifacts of a sqlite store beside its file; where that is no longer what the database says
and the old place is gone, the places are written anew.
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
    """Make a database name ``root``, the folder of artifacts beside it, where it names a folder of that name that is
    gone. The caller holds the lock of the store. A file that is no database of MLflow is left as it is."""
    try:
        with closing(sqlite3.connect(database, timeout=BUSY_SECONDS)) as connection:
            query = "SELECT DISTINCT artifact_location FROM experiments"
            locations = [str(row[0]) for row in connection.execute(query)]
            for old in set(_find_gone(locations, root)):
                with connection:  # both tables, or neither
                    for table, column in PLACES:
                        # Not LIKE, whose wildcards may stand in a path.
                        connection.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                            f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                            (root.as_uri(), len(old) + 1, old, len(old) + 1, f"{old}/"),
                        )
    except sqlite3.Error:
        return  # MLflow says what is wrong with it


def _find_gone(locations: list[str], root: Path) -> Iterator[str]:
    """Yield the addresses of the folders named like ``root`` that are gone, once ``root`` is there in their place."""
    for location in locations:
        before, name, rest = location.rpartition(f"/{root.name}")
        if not name or (rest and not rest.startswith("/")) or not location.startswith("file:///"):
            continue
        old = Path(url2pathname(urlsplit(before + name).path))
        # Where neither is there nothing was stored yet, and only a home that is gone as a whole was moved.
        if old != root and not old.exists() and (root.exists() or not old.parent.exists()):
            yield before + name
