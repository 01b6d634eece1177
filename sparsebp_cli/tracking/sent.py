"""The record of the data that a store already has of a run, and the result of one synchronisation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from sparsebp_cli.run.journal import FILE as JOURNAL

FILE = "tracking.json"


@dataclass(frozen=True)
class SyncResult:
    """The result of one synchronisation."""

    points_sent: int = 0  # metric values that the store accepted
    complete: bool = False  # whether the store now has every whole record of the journal
    problem: str = ""  # why not, in one line; empty when complete
    uri: str = ""  # the store, without credentials; empty when unknown
    mlflow_run_id: str = ""  # the run there; empty when it was not reached

    def advice(self, run_id: str) -> str:
        """Return one line on what the store lacks and the command that sends it; empty when complete."""
        if self.complete:
            return ""
        return f"{self.problem}; the journal keeps everything, `sparsebp sync {run_id}` sends it later"


class SentPoint(NamedTuple):
    """One metric value, and the byte range of its record in the journal."""

    name: str
    value: float
    time_ms: int
    step: int
    start: int
    end: int


@dataclass
class Sent:
    """``tracking.json`` in the run's folder: what the store already has. It holds no credentials."""

    uri: str  # the store, masked; for another store everything is sent again
    mlflow_run_id: str = ""  # the run there
    offset: int = 0  # bytes of the journal that were sent
    # hash of each part (tags, status, artifacts by name) as it was last sent
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
            kept.offset = 0  # another journal was sent
        return kept

    def save(self, run_folder: Path) -> None:
        """Write the file, atomically."""
        part = run_folder / f"{FILE}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(run_folder / FILE)
