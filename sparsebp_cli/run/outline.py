"""Outlines: cached summaries of journals, because a list of 2,000 runs cannot read 2,000 journals.

``outline.json`` is valid for one size and modification time of its journal. If these differ, or the file is missing or
malformed, the journal is read. The process that closes a finished journal writes its outline, and so does the first
reader of an older run. Losing it loses nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsebp_cli.run.metric import EVAL_LOSS
from sparsebp_cli.run.record import ENDS, State, from_json, is_count, is_figure, to_json

FILE = "outline.json"
JOURNAL = "journal.jsonl"
VERSION = 1
MOST_UNREADABLE = 4  # places that are named; a list of runs shows no more


@dataclass
class Outline:
    """Summary of a journal."""

    attempts: int = 0  # workers that were started
    end: State | None = None  # how the last attempt ended; None: unknown
    step: int = 0  # the highest step of any metric
    eval_step: int = -1  # the highest step with a validation loss
    eval_loss: float | None = None  # the loss at that step
    unreadable: list[str] = field(default_factory=list)  # the first places that hold no record, such as "line 7"

    def add(self, record: dict[str, Any] | None, number: int) -> None:
        """Add line ``number`` (from 1) of the journal; None for a line without a record."""
        if record is None:
            if len(self.unreadable) < MOST_UNREADABLE:
                self.unreadable.append(f"line {number}")
            return
        self.attempts = max(self.attempts, record["attempt"])
        match record["kind"]:
            case "attempt":
                self.end = None
            case "end":
                self.end = State(record["status"])
            case "metrics" if record["values"]:
                self.step = max(self.step, record["step"])
                if EVAL_LOSS.name in record["values"] and record["step"] > self.eval_step:
                    self.eval_step, self.eval_loss = record["step"], record["values"][EVAL_LOSS.name]

    def save(self, run_folder: Path, stamp: list[int]) -> None:
        """Write the outline next to its journal, atomically; a failure is ignored, because the journal has
        everything."""
        part = run_folder / f"{FILE}.{os.getpid()}.part"
        content = {"version": VERSION, "journal": stamp} | {k: to_json(v) for k, v in asdict(self).items()}
        with suppress(OSError):
            try:
                part.write_text(json.dumps(content) + "\n", encoding="utf-8")
                part.replace(run_folder / FILE)
            except OSError:
                part.unlink(missing_ok=True)


def read_stamp(run_folder: Path) -> list[int]:
    """Return size and modification time of a journal; empty if there is none."""
    try:
        found = (run_folder / JOURNAL).stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def read_outline(run_folder: Path, stamp: list[int]) -> Outline | None:
    """Return the cached outline if it is valid for the journal's stamp; None if the journal has to be read."""
    try:
        kept = json.loads((run_folder / FILE).read_bytes())
        if not isinstance(kept, dict) or (kept.pop("version"), kept.pop("journal")) != (VERSION, stamp):
            return None
        kept["eval_loss"] = from_json(kept["eval_loss"])
        found = Outline(**kept)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = is_count(found.attempts) and is_count(found.step) and is_figure(found.eval_loss)
    sound = sound and isinstance(found.unreadable, list) and all(isinstance(place, str) for place in found.unreadable)
    if not sound or found.end not in {None, *ENDS}:
        return None
    found.end = None if found.end is None else State(found.end)
    return found
