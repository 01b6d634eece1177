"""What a store already has of a run, and what one sending did."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from sparsebp_cli.run.journal import FILE as JOURNAL

FILE = "tracking.json"


@dataclass(frozen=True)
class SyncResult:
    """What one synchronisation did.

    Args:
        points_sent: Metric values that were handed to the store.
        complete: Whether the store now has every whole record of the journal.
        problem: Why not, in one line; empty when complete.
        uri: The store, without credentials; empty when it could not be told.
        mlflow_run_id: The run there; empty when it was not reached.
    """

    points_sent: int = 0
    complete: bool = False
    problem: str = ""
    uri: str = ""
    mlflow_run_id: str = ""

    def advice(self, run_id: str) -> str:
        """Return one line on what is missing in the store and what sends it; empty when nothing is.

        Args:
            run_id: Of the run.

        Returns:
            The line.
        """
        if self.complete:
            return ""
        return f"{self.problem}; the journal keeps everything, `sparsebp sync {run_id}` sends it later"


class Point(NamedTuple):
    """One metric value, and the bytes of the journal that its record lies in."""

    name: str
    value: float
    time_ms: int
    step: int
    start: int
    end: int


@dataclass
class Sent:
    """What the store already has: ``tracking.json`` in the run's folder. It holds no credentials.

    Args:
        uri: The store, masked; another store starts from nothing.
        mlflow_run_id: The run there.
        offset: Bytes of the journal that were sent.
        described: Hash of each part (tags, status, artifacts by name) as it was last sent.
    """

    uri: str
    mlflow_run_id: str = ""
    offset: int = 0
    described: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, run_folder: Path, uri: str) -> Self:
        """Read the file; a missing, damaged or foreign one means that nothing was sent."""
        try:
            kept = cls(**json.loads((run_folder / FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls(uri)
        if kept.uri != uri:
            return cls(uri)
        journal = run_folder / JOURNAL
        if kept.offset > (journal.stat().st_size if journal.exists() else 0):
            kept.offset = 0  # the journal is not the one that was sent
        return kept

    def save(self, run_folder: Path) -> None:
        """Write the file, atomically."""
        part = run_folder / f"{FILE}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(run_folder / FILE)
